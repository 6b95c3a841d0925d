"""``checkflow plan --ranks``: what it prints, its JSON, and one clear line where ranks do not fit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from checkflow.cli.main import FAILED, FOUND, USAGE, main
from checkflow.core import plan as plans
from checkflow.core.machine.device import find_device
from checkflow.planner.model_file.several_ranks import Ranks
from checkflow.planner.pipeline import Planned, Subject, plan_model
from checkflow.planner.schedule.scheduler import PlanRequest, fingerprint_of, make_plan
from checkflow.planner.timeline.steps import make_timeline

SMALL = ["llama", "--set", "layers=2", "--set", "width=256", "--set", "vocabulary=1000", "--set", "sequence=64"]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    code = main(["plan", *arguments, "--json"])
    out, error = capsys.readouterr()
    return code, json.loads(out) if out else {}, error


def plan(
    model: str, settings: dict[str, str] | None = None, ranks: Ranks | None = None, device: str = "H100"
) -> Planned:
    card = find_device(device)
    request = PlanRequest(
        bandwidth_bytes_per_second=card.link_bandwidth_bytes_per_second,
        memory_bandwidth_bytes_per_second=card.memory_bandwidth_bytes_per_second,
        memory_limit_bytes=card.memory_bytes,
    )
    return plan_model(Subject(model, None, settings or {}, None), card, request, "segment", ranks)


def test_eight_replicas_need_an_eighth_of_the_bandwidth() -> None:
    planned = plan("alexnet", ranks=Ranks(8, parallel="ddp"))
    graph = planned.graph
    groups = make_timeline(graph, [0.0] * len(graph.operators), "segment").groups  # of all state
    alone = make_plan(
        dataclasses.replace(planned.timeline, groups=groups),
        fingerprint_of(graph, planned.device),
        planned.request,
        graph_peak_bytes=planned.graph_peak_bytes,
    )
    least, eighth = (found.least_bandwidth_bytes_per_second for found in (alone, planned.outcome))
    assert least is not None
    assert eighth is not None
    assert eighth * 8 == pytest.approx(least, rel=0.01)
    assert planned.fingerprint.state_bytes * 8 == pytest.approx(graph.state_bytes, rel=0.01)
    assert planned.several is not None
    assert planned.several.global_state_bytes == graph.state_bytes


def test_the_json_of_hsdp_says_what_all_ranks_have(capsys: pytest.CaptureFixture[str]) -> None:
    hsdp = ["--ranks", "16", "--mesh", "replicate=4,shard=4", "--device", "H100"]
    code, found, _ = said(capsys, *SMALL, *hsdp)
    assert code == FOUND
    ranks = found["ranks"]
    assert (ranks["count"], ranks["mesh"], ranks["cluster"]) == (16, {"replicate": 4, "shard": 4}, "DGX H100")
    counters = 4 * sum(1 for _ in range(2 * 9 + 3))  # one of AdamW for each parameter, on every rank
    whole = 3 * 2 * found["parameters"]
    assert ranks["global_state_bytes"] == whole + 16 * counters
    assert sum(int(size) for size in ranks["bytes_by_replicas"].values()) == found["state_bytes"] - counters
    assert set(ranks["bytes_by_replicas"]) == {"4"}
    assert ranks["share_bytes"] - counters == pytest.approx(whole / 16, rel=0.05)
    assert ranks["collectives"] == 3 + 2 * 3 - 1 + 3  # gathered twice, the root once; scattered and reduced
    assert 0 < ranks["exposed_seconds"] <= ranks["collective_seconds"]
    assert ranks["iteration_seconds"] == pytest.approx(found["iteration_seconds"] + ranks["exposed_seconds"])
    seconds = found["interval"] * ranks["iteration_seconds"] + found["stall_seconds"]
    assert ranks["storage_bytes_per_second"] == pytest.approx(ranks["global_state_bytes"] / seconds)


@pytest.mark.slow
def test_the_table_of_a_file_that_shards_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--set", "tensor=2", "--ranks", "8", "--device", "H100"]) == FOUND
    out = capsys.readouterr().out
    assert "8 │ by the file, on DGX H100; the plan is one rank's" in out
    assert "jobs of several ranks run by none yet" in out


@pytest.mark.slow
def test_a_plan_of_several_ranks_is_kept_and_fits_no_job_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    ranks = ["--ranks", "4", "--parallel", "ddp", "--device", "RTX 3090"]
    assert main(["plan", "digits", *ranks, "-o", str(file)]) == FOUND
    assert plans.load(file).fingerprint.ranks == 4
    assert main(["check", str(file)]) == FOUND
    capsys.readouterr()
    assert main(["check", str(file), "digits"]) == FAILED
    assert "ranks: one process in the job, 4 ranks in the plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["alexnet", "--mesh", "shard=8"], USAGE, "give their number with --ranks"),
        (["alexnet", "--parallel", "ddp"], USAGE, "give their number with --ranks"),
        (
            ["alexnet", "--ranks", "8", "--parallel", "fsdp", "--mesh", "shard"],
            USAGE,
            "written like replicate=8,shard=8",
        ),
        (
            ["alexnet", "--ranks", "8", "--parallel", "fsdp", "--mesh", "shard=0"],
            USAGE,
            "written like replicate=8,shard=8",
        ),
        (
            ["alexnet", "--ranks", "8", "--parallel", "fsdp", "--mesh", "shard=4"],
            USAGE,
            "has 4 ranks, and --ranks says 8",
        ),
        (["alexnet", "--ranks", "8", "--device", "H100"], FAILED, "alexnet has no collective"),
        (["alexnet", "--ranks", "8", "--parallel", "ddp", "--device", "V100"], FAILED, "no cluster is known for V100"),
        (["dlrm", "--ranks", "8", "--parallel", "ddp", "--device", "H100"], FAILED, "sparse gradients is not planned"),
        ([*SMALL, "--set", "tensor=2", "--device", "H100"], FAILED, "tensor=2 needs several ranks"),
        ([*SMALL, "--set", "tensor=3", "--ranks", "8", "--device", "H100"], FAILED, "tensor=3 needs several ranks"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_fit_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    found, data, error = said(capsys, *arguments)
    assert (found, data) == (code, {})
    assert message in error.splitlines()[-1]


WRAPPED = """
import torch, checkflow
import torch.distributed as dist
from torch import nn

def build():
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.FileStore("{store}", 1), rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), init_sync=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return checkflow.TrainingStep(model, optimizer, loss=lambda model, x: model(x).sum(), batch=torch.zeros(2, 4))
"""


def test_a_ddp_model_is_never_planned_as_if_it_were_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch.distributed as dist

    file = tmp_path / "model.py"
    file.write_text(WRAPPED.format(store=tmp_path / "store"))
    try:
        assert said(capsys, str(file), "--device", "H100")[0] == FOUND  # one rank is alone
    finally:
        dist.destroy_process_group()
    code, found, _ = said(capsys, str(file), "--device", "H100", "--ranks", "8")
    assert code == FOUND
    assert found["ranks"]["collectives"] == 1
    assert found["ranks"]["bytes_by_replicas"] == {"8": found["state_bytes"]}
