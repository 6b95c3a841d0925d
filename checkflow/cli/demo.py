"""``checkflow demo``: a plan, and a training run that is killed and loses nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from checkflow.cli import options, planning
from checkflow.cli.console import FAILED, FOUND, complain, print_json, print_line, print_parts
from checkflow.cli.options import GranularityName
from checkflow.core.errors import InfeasibleError

if TYPE_CHECKING:
    from checkflow.demo.kills import DemoResult


def demo(
    epochs: Annotated[int, typer.Option("--epochs", min=3, help="epochs of training on the digits")] = 5,
    seed: Annotated[int, typer.Option("--seed", help="seed of the training and of the times of the kills")] = 0,
    as_json: options.Json = False,
) -> int:
    """Plan ResNet-18; then train on the CPU, kill the training three times, and prove that nothing is lost."""
    from checkflow.cli.tables import plan as plan_table
    from checkflow.planner.pipeline import compare_model

    chosen = options.choose_device("RTX 3090")
    planned = planning.plan_of(
        planning.subject_of("resnet18", 32, None, None), chosen, planning.request_of(chosen), GranularityName.SEGMENT
    )
    if not as_json:
        print_parts([*plan_table.plan_tables(planned), *plan_table.comparison_tables([compare_model(planned)])])
    result = _train_and_kill(epochs, seed, quiet=as_json)
    if as_json:
        print_json(plan_table.demo_json(planned, result))
    else:
        print_parts(plan_table.demo_tables(result))
    for check_ in result.checks:
        if not check_.holds:
            complain(f"this check fails: {check_.claim}: {check_.seen}")
    return FOUND if result.passed and planned.outcome.plan is not None else FAILED


def _train_and_kill(epochs: int, seed: int, *, quiet: bool) -> DemoResult:
    from checkflow.core import plan as plans
    from checkflow.demo import kills
    from checkflow.demo.training import BATCH_SIZE

    with tempfile.TemporaryDirectory(prefix="checkflow-demo-") as folder:
        cpu = options.choose_device("cpu")
        planned = planning.plan_of(
            planning.subject_of("digits", BATCH_SIZE, None, None),
            cpu,
            planning.request_of(cpu),
            GranularityName.SEGMENT,
        )
        if planned.outcome.plan is None:
            raise InfeasibleError(planned.outcome.explanation)
        file = Path(folder) / "plan.json"
        plans.save(planned.outcome.plan, file)
        return kills.run(
            Path(folder), file, lambda news: None if quiet else print_line(f"- {news}"), epochs=epochs, seed=seed
        )
