"""``make pictures``: the pictures of docs/how-to/pages.md, of pages that are made anew.

A job on the CPU is started three times and killed twice; ``python -m docs.pictures DIRECTORY ITERATIONS`` is one start.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import tempfile
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
WIDTH = 1000
MOST_BYTES = 200_000
STARTS = (130, 210, 10**9)  # iterations until the job is killed


def main() -> None:
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), int(sys.argv[2]))
        return
    from tests.support.html.browser import browser

    with tempfile.TemporaryDirectory() as name, browser() as window:
        folder = Path(name)

        def checkflow(*arguments: str) -> None:
            subprocess.run([sys.executable, "-m", "checkflow", *arguments], check=True, cwd=folder)

        checkflow("plan", "gpt2", "--bandwidth", "3GB/s", "--overhead", "1%", "-o", "gpt2.json")
        checkflow("show", "gpt2.json", "--html", "plan.html")
        for iterations in STARTS:
            command = [sys.executable, "-m", "docs.pictures", str(folder / "checkpoints"), str(iterations)]
            subprocess.run(command, check=False)  # some are killed
        checkflow("report", "checkpoints", "--html", "run.html")
        checkflow("compare", "alexnet", "vgg11", "resnet18", "bert", "gpt2", "--html", "comparison.html")
        for page, last in (("plan", "iteration"), ("run", "lag"), ("comparison", "stalls")):
            window.open(folder / f"{page}.html", width=WIDTH, height=3000)
            bottom = window.run("return document.getElementById(arguments[0]).getBoundingClientRect().bottom", last)
            clip = {"x": 0, "y": 0, "width": WIDTH, "height": bottom + 8, "scale": 1}
            command = window.driver.execute_cdp_cmd
            taken = command("Page.captureScreenshot", {"format": "png", "clip": clip, "captureBeyondViewport": True})
            picture = base64.b64decode(taken["data"])
            if len(picture) > MOST_BYTES:
                raise SystemExit(f"the picture of the {page} page has {len(picture)} bytes, more than {MOST_BYTES}")
            (IMAGES / f"page-{page}.png").write_bytes(picture)


def train(directory: Path, iterations: int) -> None:
    """Train to the end, or die after so many iterations."""
    import torch

    import checkflow

    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = torch.utils.data.TensorDataset(torch.randn(3200, 64), torch.randint(0, 3, (3200,)))
    layers = (torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU())
    model = torch.nn.Sequential(*layers, torch.nn.Linear(512, 3))
    optimizer = torch.optim.Adam(model.parameters())
    loader = checkflow.DataLoader(data, batch_size=32, shuffle=True)
    with checkflow.Checkpointer(model, optimizer, loader, directory=directory) as checkpointer:
        for _ in checkpointer.epochs(6):
            for x, y in checkpointer.loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                iterations -= 1
                if not iterations:
                    os._exit(1)


if __name__ == "__main__":
    main()
