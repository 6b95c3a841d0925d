"""A training step recorded as a live job's iteration is."""

from __future__ import annotations

from checkflow.core.training_step import TrainingStep
from checkflow.planner.record.recorder import IterationRecorder, RecordedIteration


def record_step(step: TrainingStep, *, name: str) -> RecordedIteration:
    """Run a training step twice, for real, and record the second time.

    Raises:
        TraceError: as :meth:`IterationRecorder.end`.
    """
    held = step.run(step.batch)
    recorder = IterationRecorder(step.models, step.optimizers, name=name)
    recorder.begin(step.batch, held=held)
    try:
        held = step.run(step.batch)
        return recorder.end(batch=step.batch, micro_batches=step.micro_batches)
    finally:
        recorder.abandon()
