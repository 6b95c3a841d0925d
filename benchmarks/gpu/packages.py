"""The packages that a run on a GPU needs: whether they are here, and how they come to a machine without a network."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.figures import Row

ROOT = Path(__file__).parents[2]
LEAST_TORCH = (2, 11)
#: Of the package's dependencies, what only other commands use: a solver with its own licence.
NOT_NEEDED = frozenset(("gurobipy",))
#: Of those for development, what tests use.
FOR_TESTS = frozenset(("pytest", "pytest-timeout", "hypothesis"))
#: What a package is imported as, where that is not its name.
MODULES = {"pytest-timeout": "pytest_timeout"}
#: What these need besides, torch's own needs apart: a wheel that is carried alone is found, and cannot be imported.
NEEDS = {
    "highspy": ("numpy",),
    "hypothesis": ("sortedcontainers",),
    "pydantic": ("annotated-types", "pydantic-core", "typing-extensions", "typing-inspection"),
    "pytest": ("iniconfig", "packaging", "pluggy", "pygments"),
    "rich": ("markdown-it-py", "mdurl", "pygments"),
    "typer": (
        "annotated-doc", "annotated-types", "click", "markdown-it-py", "mdurl", "pydantic-core", "pygments", "rich",
        "shellingham", "typing-inspection",
    ),
}  # fmt: skip
#: What a run imports before anything else: packages with compiled parts or needs of their own, then what uses them all.
TRIED = (
    "pydantic", "pulp", "highspy", "safetensors", "msgpack", "xxhash", "checkflow", "checkflow.runtime.checkpointer",
    "checkflow.planner.pipeline", "checkflow.cli.main",
)  # fmt: skip
#: Tags of wheels that today's Linux takes; pip takes each to mean itself alone.
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux1")


def minima() -> dict[str, tuple[int, ...]]:
    """The packages that a run needs besides torch, with the least version of each, as pyproject.toml has them."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    found = {}
    for requirement in needed:
        name, _, rest = requirement.partition(">=")
        development = requirement in project["optional-dependencies"]["dev"]
        if name != "torch" and name not in NOT_NEEDED and (not development or name in FOR_TESTS):
            found[name] = version_of(rest)
    return found


def version_of(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: (3, 0) of "3.0,<4", (2, 11, 0) of "2.11.0+cu130"."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def lacking(needed: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Which of these packages this Python does not have, or has in a version that is too old."""
    missing = []
    for name, least in needed.items():
        try:
            present = version_of(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            # What was put there without its metadata counts too.
            present = (10**6,) if importlib.util.find_spec(MODULES.get(name, name)) else ()
        if present < least:
            missing.append(name)
    return missing


def try_imports(options: Mapping[str, Any], send: Callable[[Row], None]) -> None:
    """A part: a row for each module that a run needs and cannot import, with the module that is absent, if one is.

    Args:
        options: ``modules``: others than :data:`TRIED`.
    """
    for name in options.get("modules", TRIED):
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
            absent = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            send({"module": name, "absent": absent.partition(".")[0], "said": said})


def how_to_mend(rows: Sequence[Row]) -> str:
    """What to do about what :func:`try_imports` has found; the last line names it."""
    known = minima()
    missing = {row["module"] if row["module"] in known else row["absent"].replace("_", "-") for row in rows}
    told = "; ".join(f"{row['module']} ({row['said']})" for row in rows)
    if "" in missing:  # no package brings that
        return f"checkflow: {sys.executable} cannot import {told}"
    return how_to_bring(sorted(missing), told)


def how_to_bring(missing: Sequence[str], why: str = "") -> str:
    """How it comes here, with what it needs; in the last line what is missing, and what to do.

    Args:
        why: what it is known by, where that is more than that it is not there.
    """
    needs = sorted({need for name in missing for need in NEEDS.get(name, ())} - set(missing))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    machine = "aarch64" if os.uname().machine == "aarch64" else "x86_64"
    tags = " ".join(f"--platform {platform}_{machine}" for platform in PLATFORMS)
    names = " ".join([*missing, *needs])
    return (
        "where there is a network, in a clone of this repository:\n"
        f"  python3 -m pip download --only-binary=:all: --python-version {version} --implementation cp {tags}"
        f" --constraint constraints.txt --dest wheels {names}\n"
        f"checkflow: {sys.executable} (Python {version}) lacks {why or ', '.join(missing)}: bring the wheels of "
        f"{', '.join([*missing, *needs])}, and then: make test-gpu WHEELS=wheels"
    )


def install(wheels: Path, target: Path) -> None:
    """Unpack those wheels of a folder whose packages are not here, or older here. The torch that is here stays.

    Raises:
        SystemExit: there are no wheels, or pip refuses one; the message says why.
    """
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise SystemExit(f"checkflow: there are no wheels in {wheels}")
    chosen = []
    for wheel in found:
        name, version = wheel.name.split("-")[:2]
        name = re.sub(r"[-_.]+", "-", name).lower()
        try:
            older = version_of(importlib.metadata.version(name)) < version_of(version)
        except importlib.metadata.PackageNotFoundError:
            older = True
        if older and name != "torch":
            chosen.append(wheel)
    if chosen:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-cache-dir"]
        done = subprocess.run([*command, "--target", str(target), *map(str, chosen)], capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise SystemExit(f"checkflow: pip does not install the wheels in {wheels}: {said[-1] if said else '?'}")
    importlib.invalidate_caches()
