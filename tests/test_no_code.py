"""Nothing that is read can run code: files that try it, and what the source may not call."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WINGS = ("checkflow", "planner", "runtime", "models")
PICKLING = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "copyreg"}
# Copies of a loader's state in memory, between a process and its own workers: no file, and nobody
# else's bytes.
# ``torch.distributed.checkpoint`` describes what it wrote in a pickle: an unpickler that knows its few classes and no
# other reads that, when weights are imported from there.
IN_MEMORY = {
    "runtime/data/adapters/freeze.py": {"Pickler", "HIGHEST_PROTOCOL", "loads"},
    "runtime/data/adapters/stateful.py": {"PicklingError"},  # what the other one raises
    "runtime/weights/dcp_files.py": {"Unpickler", "UnpicklingError"},
    "runtime/weights/torch_files.py": {"UnpicklingError"},
    "checkflow/anchors/hooks.py": {"dispatch_table"},  # what users pickle of a watched model; nothing is read
}
IN_MEMORY_USERS = {
    "data.adapters.freeze": {"runtime/data/adapters/stateful.py", "runtime/data/adapters/worker_streams.py"},
}


def sources(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents if parent != ROOT and ROOT in parent.parents):
                yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def imported(tree: ast.AST) -> set[str]:
    """Every module that is imported, anywhere in a file, by its full name."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_pickle_is_called_nowhere_but_in_memory() -> None:
    used = {}
    for name, tree in sources(*WINGS):
        if any(module.split(".")[0] in PICKLING for module in imported(tree)):
            used[name] = {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in PICKLING
            }
    assert used == IN_MEMORY


@pytest.mark.slow
def test_what_pickles_in_memory_is_not_in_the_stores_way() -> None:
    trees = [(name, imported(tree)) for name, tree in sources(*WINGS)]
    for module, expected in IN_MEMORY_USERS.items():
        assert {name for name, found in trees if f"checkflow.runtime.{module}" in found} == expected
    modules = [
        "store.store",
        "store.reader",
        "store.discovery",
        "store.files",
        "format.manifest",
        "system.fs",
        "format.layout",
        "store.lock",
        "format.codec",
        "persist.writer",
        "weights.exporter",
        "inspect",
    ]
    program = (
        f"import sys\nfor name in {modules}: __import__('checkflow.runtime.' + name)\nimport checkflow.core.plan\n"
        f"print([one for one in {[*IN_MEMORY_USERS]} if 'checkflow.runtime.' + one in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def unsafe_loads(tree: ast.AST) -> list[int]:
    """Lines with a torch.load without a literal ``weights_only=True``, or a numpy load that may unpickle."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "numpy", "torch.serialization"):
            lines += [node.lineno for alias in node.names if alias.name == "load"]
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "load":
            continue
        owner = ast.unparse(node.func.value)
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        if owner in ("torch", "torch.serialization"):
            safe = named.get("weights_only")
            if not (isinstance(safe, ast.Constant) and safe.value is True):
                lines.append(node.lineno)
        elif owner in ("np", "numpy") and "allow_pickle" in named:
            lines.append(node.lineno)
    return lines


@pytest.mark.slow
def test_torch_load_has_a_literal_weights_only() -> None:
    found = {name: unsafe_loads(tree) for name, tree in sources(*WINGS, "benchmarks", "examples", "tests")}
    assert len(found) > 100
    assert {name: lines for name, lines in found.items() if lines and not name.startswith("examples/")} == {}


@pytest.mark.parametrize(
    "bad",
    [
        "torch.load(path)", "torch.load(path, weights_only=False)", "torch.load(path, weights_only=flag)",
        "torch.load(path, **{'weights_only': True})", "torch.serialization.load(path)", "from torch import load",
        "np.load(path, allow_pickle=True)",
    ],
)  # fmt: skip
def test_what_is_unsafe_is_seen(bad: str) -> None:
    assert unsafe_loads(ast.parse(bad)) == [1]
    assert unsafe_loads(ast.parse("torch.load(path, weights_only=True)")) == []


def test_files_that_try_to_run_code(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.hostile_files", str(tmp_path)],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["told"], answer["ran"]) == ([], False)
    assert answer["awake"]  # what all of these try was seen, and happened, when it was done on purpose
    harmless = {"a pickle as bytes and as text", "code beside the files"}
    refused = {name for name, text in answer["found"].items() if "Error: " in text}
    assert len(answer["found"]) == 12
    assert refused == set(answer["found"]) - harmless
