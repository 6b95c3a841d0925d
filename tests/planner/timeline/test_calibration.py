"""The roofline against the feasible cells of the paper's Table I. (Against published throughputs: test_throughputs.)"""

from __future__ import annotations

import pytest

from checkflow.core.machine.device import find_device
from checkflow.planner.model_file.load import load_training_step
from checkflow.planner.timeline.roofline import Float32Precision, durations_seconds
from checkflow.planner.trace.trace import trace

DEFAULTS = Float32Precision()


@pytest.mark.parametrize(
    ("model", "batch_size", "bandwidths"),
    [("alexnet", 32, (63e9,)), ("alexnet", 1024, (63e9, 40e9, 20e9)), ("bert", 32, (63e9, 40e9, 20e9))],
)
def test_feasible_cells_of_table_1(model: str, batch_size: int, bandwidths: tuple[float, ...]) -> None:
    """What the Checkflow paper found feasible on an RTX 3090 must be: the state fits into what the link moves before
    the optimizer first writes (all of these models' state is first written there)."""
    name, step = load_training_step(model, batch_size=batch_size)
    graph = trace(step, name=name)
    durations = durations_seconds(graph, find_device("RTX 3090"), DEFAULTS)
    before_the_optimizer = sum(
        seconds for seconds, operator in zip(durations, graph.operators, strict=True) if operator.phase != "optimizer"
    )
    for bandwidth in bandwidths:
        assert graph.state_bytes <= before_the_optimizer * bandwidth
