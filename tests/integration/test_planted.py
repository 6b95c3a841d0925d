"""What somebody has put at the names of a store's files: a start neither waits for it nor takes it for its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import planted_job

ROOT = Path(__file__).parents[2]
HANG_SECONDS = 300.0  # which no machine needs for all names of a kind, however busy


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "directory", "link", "dangling link", "stranger"])
def test_a_start_neither_hangs_at_what_is_planted_nor_trusts_it(tmp_path: Path, kind: str) -> None:
    """It takes its place, or passes it over, or refuses: by its name, and with what to do."""
    if kind in ("device", "stranger") and os.geteuid() != 0:
        pytest.skip("only root makes devices, and gives files away")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.programs.planted_job", str(tmp_path), kind],
        capture_output=True, text=True, check=False, timeout=HANG_SECONDS,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert set(rows) == set(planted_job.NAMES)
    for name, row in rows.items():
        told = " ".join([*row["said"], row["error"] or ""])
        file = name.rpartition("/")[2]
        assert row["kept"], name  # what a link leads to
        if kind == "stranger":
            unread = name in planted_job.DRAFTS or name.startswith((".tmp-", ".trash-", ".broken-"))
            if unread:
                assert (row["error"], row["resumed"]) == (None, 2), row
            else:
                refused = f"/{name} belongs to user nobody ({planted_job.STRANGER}) (mode "
                assert row["error"].startswith("ForeignError: "), row
                assert refused in row["error"], row
                assert "trust=" in row["error"], row
            continue
        if name == "plans" and kind != "directory":
            assert "/plans: it is no directory of its own: remove it" in told, row
        if name == ".lock":
            assert row["error"].startswith("StorageError: "), row
        elif (name, kind) == (".shards.json", "directory"):
            assert "remove .shards.json" in row["error"], row
        else:
            assert row["error"] is None, row
            damaged = name.startswith(planted_job.NEWEST)
            assert row["resumed"] == (1 if damaged else 2), row
            if damaged:
                assert "set aside as .broken-" in told, row
        if name in (".lock", ".memory.json", "report.json", "profile.json"):
            assert f"/{file}" in told, row
            assert "remove it" in told, row
        if name in planted_job.DRAFTS and kind == "directory" and name != ".tmp-shards":
            assert f"remove {file}" in told, row
