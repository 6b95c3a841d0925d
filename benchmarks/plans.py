"""The time of ``checkflow plan`` as a whole process, for every shipped model, batch 1 and 32, SGD and Adam.

``python benchmarks/plans.py [--only bert …]``: a table and one line of JSON. Each plan is made twice, by processes with
different hash seeds, whose plan files must be the same bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODELS = ("alexnet", "mnasnet", "resnet18", "vgg11", "vit", "resnet3d", "transformer", "bert")


def run(model: str, batch_size: int, optimizer: str, seed: str, path: Path) -> tuple[float, int, dict[str, Any], bytes]:
    """Wall seconds, exit code, JSON and plan file (empty where there is none) of one process."""
    command = [sys.executable, "-m", "checkflow", "plan", model, "--batch-size", str(batch_size)]
    command += ["--optimizer", optimizer, "--json", "-o", str(path)]
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": seed})
    seconds = time.perf_counter() - begun
    return seconds, done.returncode, json.loads(done.stdout), path.read_bytes() if path.exists() else b""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=MODELS, default=MODELS)
    rows = []
    print(f"{'model':12} {'batch':>5} {'optimizer':>9} {'seconds':>15} {'status':>10} {'extra peak':>12} same bytes")
    for model, batch, optimizer in itertools.product(parser.parse_args().only, (1, 32), ("sgd", "adam")):
        with tempfile.TemporaryDirectory() as folder:
            results = [run(model, batch, optimizer, seed, Path(folder) / seed) for seed in ("1", "2")]
        seconds, codes = [result[0] for result in results], {result[1] for result in results}
        answer, same = results[0][2], results[0][3] == results[1][3]
        extra = None if answer["plan_peak_bytes"] is None else answer["plan_peak_bytes"] - answer["training_peak_bytes"]
        rows.append(
            {
                "model": model,
                "batch_size": batch,
                "optimizer": optimizer,
                "seconds": seconds,
                "exit_codes": sorted(codes),
                "status": answer["status"],
                "extra_peak_bytes": extra,
                "least_bandwidth_bytes_per_second": answer["least_bandwidth_bytes_per_second"],
                "same_bytes": same,
            }
        )
        both = " and ".join(f"{value:.1f}" for value in seconds)
        print(f"{model:12} {batch:5} {optimizer:>9} {both:>15} {answer['status']:>10} {extra!s:>12} {same}", flush=True)
    print(json.dumps({"cores": os.cpu_count(), "plans": rows}))


if __name__ == "__main__":
    main()
