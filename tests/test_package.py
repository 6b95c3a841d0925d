"""The package as users meet it: a wheel alone in an environment, a clone without links, and what importing costs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
WINGS = ("planner", "runtime", "models")
SOLVERS = ("pulp", "highspy", "gurobipy")
COMMAND_LINE = ("typer", "click", "rich")


def run(command: Sequence[str | Path], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run to the end; what the command said is in the message of a failing test."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done


def copy_sources(target: Path, *, links: str = "kept") -> Path:
    """The files that a package is made of. Links are "kept", left out ("none"), or text, as git writes them where the
    file system has no links."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "checkflow", target / "checkflow", symlinks=True, ignore=ignored)
    for wing in WINGS:
        shutil.copytree(ROOT / wing, target / wing, ignore=ignored)
        link = target / "checkflow" / wing
        if links != "kept":
            link.unlink()
        if links == "text":
            link.write_text(f"../{wing}")
    shutil.copytree(ROOT / "examples", target / "examples", ignore=ignored)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel made from the sdist."""
    sources = copy_sources(tmp_path_factory.mktemp("sources"))
    out = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, sources], out)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """A fresh environment with nothing but the wheel in it, and the names that the wheel added to its site-packages.

    The dependencies are those of the environment that runs the tests, which a path file makes visible: path files in
    there have no effect, so an editable checkflow stays out of sight.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    before = {path.name for path in site.iterdir()}
    python = folder / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps", wheel], folder)
    added = {path.name for path in site.iterdir()} - before
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder, added


def names_in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_holds_every_source_file_once(wheel: Path) -> None:
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "checkflow").rglob("*.py")}
    expected |= {"checkflow/py.typed", "checkflow/demo/digits.npz", "checkflow/demo/digits.md"}
    for wing in WINGS:
        expected |= {f"checkflow/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / wing).rglob("*.py")}
    assert {name for name in names_in_wheel(wheel) if ".dist-info/" not in name} == expected


def test_sdist_holds_real_folders_the_examples_and_the_licence(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    assert "LICENSE" in members
    for wing in WINGS:
        assert members[f"checkflow/{wing}/__init__.py"].isfile()
    examples = {path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").rglob("*.*") if path.suffix != ".pyc"}
    assert {name for name in members if name.startswith("examples/") and members[name].isfile()} == examples
    assert len(examples) >= 6
    assert not any(member.issym() or member.islnk() for member in members.values())


def test_wheel_adds_only_checkflow(environment: tuple[Path, set[str]], wheel: Path) -> None:
    _, added = environment
    assert added == {"checkflow", "-".join(wheel.name.split("-")[:2]) + ".dist-info"}


def test_installed_wheel_plans_from_any_folder(environment: tuple[Path, set[str]], tmp_path: Path) -> None:
    # Users' repositories have folders of these names; they must not be taken for checkflow's.
    for wing in WINGS:
        (tmp_path / wing).mkdir()
        (tmp_path / wing / "__init__.py").write_text("raise RuntimeError('a folder of the user was imported')")
    command = environment[0] / "bin" / "checkflow"
    done = run([command, "plan", "resnet18", "--json", "-o", "plan.json"], tmp_path, PYTHONPATH="")
    assert json.loads(done.stdout)["parameters"] == 11_689_512
    where = run([environment[0] / "bin" / "python", "-c", "import checkflow; print(checkflow.__file__)"], tmp_path)
    assert str(environment[0]) in where.stdout
    assert "plan holds" in run([command, "check", "plan.json"], tmp_path, PYTHONPATH="").stdout


@pytest.mark.parametrize("links", ["none", "text"])
def test_a_clone_without_links_says_so_in_one_line(links: str, tmp_path: Path) -> None:
    clone = copy_sources(tmp_path / "clone", links=links)
    command = [sys.executable, "-P", "-c", "import checkflow"]
    environment = {**os.environ, "PYTHONPATH": str(clone)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: {clone / 'checkflow'}/planner, runtime and models must be symbolic links, which this checkout "
        "lacks: git config core.symlinks true, then git checkout -- checkflow"
    )


def modules_after(code: str, folder: Path) -> set[str]:
    """Top-level modules and checkflow's own that a fresh process has imported after ``code``."""
    done = run([sys.executable, "-c", code + "\nimport sys; print(*sys.modules)"], folder)
    names = done.stdout.splitlines()[-1].split()
    return {name for name in names if "." not in name or name.startswith("checkflow")}


def test_importing_checkflow_imports_next_to_nothing(tmp_path: Path) -> None:
    added = modules_after("import checkflow", tmp_path) - modules_after("", tmp_path)
    assert added & {"torch", "numpy", "pydantic", *SOLVERS, *COMMAND_LINE} == set()
    assert {name for name in added if name.startswith("checkflow")} <= {"checkflow"}


def test_job_with_a_plan_imports_no_solver_and_no_command_line(tmp_path: Path) -> None:
    run([sys.executable, "-m", "checkflow", "plan", "digits", "--device", "cpu", "-o", tmp_path / "plan.json"], ROOT)
    code = """
import torch, checkflow
from checkflow.models.digits import DigitsNet
model = DigitsNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
with checkflow.Checkpointer(model, optimizer, directory="checkpoints", plan="plan.json") as checkpointer:
    for _ in checkpointer.steps(2):
        optimizer.zero_grad()
        model(torch.rand(2, 1, 8, 8)).sum().backward()
        optimizer.step()
"""
    added = modules_after(code, tmp_path)
    assert added & {*SOLVERS, *COMMAND_LINE} == set()
    assert "checkflow.cli.main" not in added
    assert not {name for name in added if name.startswith("checkflow.planner")} - {
        "checkflow.planner",
        "checkflow.planner.schedule",
        "checkflow.planner.schedule.replay",
    }


def test_job_that_makes_its_plan_imports_no_solver_and_no_command_line(tmp_path: Path) -> None:
    """And its script needs no main guard: nothing runs it a second time."""
    code = """
import time, torch, checkflow
open("begun", "a").write("once")
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
with checkflow.Checkpointer(model, optimizer, directory="checkpoints") as checkpointer:
    for _ in checkpointer.steps(100_000):
        optimizer.zero_grad()
        model(torch.rand(2, 8)).sum().backward()
        optimizer.step()
        if checkpointer.report()["plan"]:
            break
        time.sleep(0.01)
    assert checkpointer.report()["plan"]["source"] == "recorded"
"""
    added = modules_after(code, tmp_path)
    assert (tmp_path / "begun").read_text() == "once"
    assert added & {*SOLVERS, *COMMAND_LINE} == set()
    assert "checkflow.cli.main" not in added


def test_help_imports_no_torch(tmp_path: Path) -> None:
    code = "from checkflow.cli.main import main\nassert main(['--help']) == 0\nassert main(['plan', '--help']) == 0"
    assert "torch" not in modules_after(code, tmp_path)
