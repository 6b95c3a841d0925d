"""Programs of plans without snapshots: where chunks are released."""

from __future__ import annotations

import dataclasses
import functools

from hypothesis import given, settings
from hypothesis import strategies as st

from checkflow.core.plan import Plan
from checkflow.runtime.snapshot.program import RELEASE_SECONDS, compile_plan
from tests.support.horizons import make_step
from tests.support.oracle import random_plan


@functools.cache
def _direct(seed: int) -> Plan:
    """A random plan whose chunks all leave from live tensors, in time."""
    step = make_step()
    step.run(step.batch)
    plan = random_plan(step.models, step.optimizers, seed, chunk_bytes=1000)
    last = len(plan.timeline.steps) - 1
    chunks = [
        dataclasses.replace(
            chunk, snapshot_step=None, offload_step=min(chunk.offload_step, plan.deadlines[chunk.tensor] or last)
        )
        for chunk in plan.chunks
    ]
    return dataclasses.replace(plan, chunks=tuple(sorted(chunks, key=lambda chunk: chunk.offload_step)))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 5), exponent=st.floats(3, 12))
def test_what_the_link_takes_at_once_is_released_at_once(seed: int, exponent: float) -> None:
    plan = dataclasses.replace(_direct(seed), bandwidth_bytes_per_second=10**exponent)
    anchors = [index for index, step in enumerate(plan.timeline.steps) if step.anchor is not None]
    places = {plan.timeline.steps[index].anchor: index for index in anchors}
    program = compile_plan(plan)
    gathered = [(places[work.key], work.release) for work in program.works if work.release]
    assert [chunk for _, release in gathered for chunk in release] == list(range(len(plan.chunks)))
    own_places = [max(index for index in anchors if index <= chunk.offload_step) for chunk in plan.chunks]
    most_bytes = plan.bandwidth_bytes_per_second * RELEASE_SECONDS
    for number, (place, release) in enumerate(gathered):
        sizes = [plan.chunks[chunk].length_bytes for chunk in release]
        early = [size for chunk, size in zip(release, sizes, strict=True) if own_places[chunk] != place]
        assert own_places[release[0]] == place
        assert all(place <= own_places[chunk] for chunk in release)
        assert sum(early) <= most_bytes
        if number:  # what came just before could not have been released with this
            before = sum(plan.chunks[chunk].length_bytes for chunk in gathered[number - 1][1])
            assert before + sizes[0] > most_bytes
    assert {chunk for work in program.works for chunk in work.due} == {
        index for index, chunk in enumerate(plan.chunks) if plan.deadlines[chunk.tensor] is not None
    }
