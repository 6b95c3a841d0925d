"""What ``checkflow plan`` costs as a whole process for the largest shipped models.

Seconds are those of the clock and of the processors; memory is the process's largest resident set. Plans are for
H200s, some for several ranks; ``--relax-memory`` lets them be made where training alone exceeds their memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CASES: dict[str, list[str]] = {
    "llama-8B": ["llama", "--set", "size=8B"],
    "llama-70B": ["llama", "--set", "size=70B"],
    "llama-405B": ["llama", "--set", "size=405B"],
    "llama-8B-fsdp-64": ["llama", "--set", "size=8B", "--ranks", "64", "--parallel", "fsdp"],
    "llama-405B-tp-8192": ["llama", "--set", "size=405B", "--set", "tensor=8", "--ranks", "8192"],
    "dlrm": ["dlrm"],
    "dlrm-sparse-adam": ["dlrm", "--set", "table_optimizer=sparse_adam"],
}
ANSWERS = ("status", "operators", "steps", "parameters", "state_bytes", "chunks", "trace_seconds", "plan_seconds")


def run(arguments: list[str]) -> dict[str, Any]:
    """One process of ``checkflow plan``: its cost, its exit code, and what it answered."""
    with tempfile.TemporaryDirectory() as folder:
        answer, file = Path(folder, "answer.json"), Path(folder, "plan.json")
        command = [sys.executable, "-m", "checkflow", "plan", *arguments, "--device", "H200", "--relax-memory"]
        begun = time.perf_counter()
        with answer.open("wb") as output:
            process = subprocess.Popen([*command, "--json", "-o", str(file)], stdout=output, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        text = answer.read_text()
        if not text:
            raise SystemExit(f"checkflow plan {' '.join(arguments)} failed with exit code {process.returncode}")
        told = json.loads(text)
        return {
            "exit_code": process.returncode,
            "seconds": seconds,
            "processor_seconds": usage.ru_utime + usage.ru_stime,
            "peak_resident_bytes": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
            "plan_file_bytes": file.stat().st_size if file.exists() else None,
            **{key: told[key] for key in ANSWERS},
        }


def main() -> None:
    cores = os.cpu_count()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    results = Path(__file__).parent / "results" / f"large-models-{cores}-cores.json"
    parser.add_argument("--output", type=Path, default=results)
    chosen = parser.parse_args()
    print(
        f"{'model':18} {'seconds':>8} {'CPU s':>6} {'RSS GB':>7} {'operators':>9} {'state GB':>9} {'chunks':>7} status"
    )
    rows = {}
    for name in chosen.only:
        row = rows[name] = run(CASES[name])
        print(
            f"{name:18} {row['seconds']:8.1f} {row['processor_seconds']:6.1f} {row['peak_resident_bytes'] / 1e9:7.2f}"
            f" {row['operators']:9} {row['state_bytes'] / 1e9:9.1f} {row['chunks']:7} {row['status']}",
            flush=True,
        )
    chosen.output.write_text(json.dumps({"cores": cores, "models": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
