"""The tests are tested: what keeps data safe is deleted from the source, one thing at a time; the suite must go red.

``python -m tests.faults.mutations [--all]`` prints one line of JSON; the tests run the first of each kind. Places are
found in the syntax tree. Nothing on disk changes: a test run of its own compiles the changed tree.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
STORE, FILE_WRITER, FS, FILES, MANIFEST, PLAN = (
    "checkflow.runtime.store.store", "checkflow.runtime.store.file_writer", "checkflow.runtime.system.fs",
    "checkflow.runtime.store.files",
    "checkflow.runtime.format.manifest", "checkflow.core.plan",
)  # fmt: skip
CLEANUP = "checkflow.runtime.store.cleanup"
# The part of the suite that has to notice: seconds each.
SUITE = {
    STORE: (
        "tests/runtime/store/test_store.py tests/runtime/store/test_retention.py tests/runtime/store/test_cleanup.py",
        "power_cut or durable or links or kill_at or rewind or planted or comes_back",
    ),
    CLEANUP: (
        "tests/runtime/store/test_store.py tests/runtime/store/test_cleanup.py",
        "settled or links or comes_back",
    ),
    FS: (
        "tests/runtime/store/test_store.py tests/runtime/store/test_reader.py tests/runtime/store/test_cleanup.py",
        "planted or link or files_that_are_none or cannot_be_used or durable",
    ),
    FILE_WRITER: ("tests/runtime/store/test_store.py", "power_cut_at_any or comes_back"),
    FILES: (
        "tests/runtime/store/test_reader.py",
        "flipped or length or none or attacker or later_block or another_step or linked",
    ),
    MANIFEST: ("tests/runtime/store/test_reader.py", "flipped or attacker or length"),
    PLAN: ("tests/core/test_plan_faults.py", ""),
}
ENVIRONMENT = "CHECKFLOW_MUTATION"


@dataclass(frozen=True)
class Mutation:
    """One thing to delete: the ``index``-th place of a kind in a module."""

    kind: str
    module: str
    index: int
    place: str  # function and source, for people
    line: int


def _call_name(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _deletes_call(*names: str) -> Callable[[ast.stmt], bool]:
    return lambda node: isinstance(node, ast.Expr) and _call_name(node.value) in names


def _deletes_refusal(error: str) -> Callable[[ast.stmt], bool]:
    """An ``if`` that does nothing but refuse: it never does then."""

    def is_refusal(node: ast.stmt) -> bool:
        return isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Raise) and (
            _call_name(node.body[-1].exc) == error if node.body[-1].exc else False
        )  # fmt: skip

    return is_refusal


def _never(node: ast.stmt) -> ast.stmt:
    return ast.copy_location(ast.Pass(), node)


def _drop_flags(*flags: str) -> Callable[[ast.stmt], bool]:
    return lambda node: (
        any(isinstance(part, ast.Attribute) and part.attr in flags for part in ast.walk(node))
        and (isinstance(node, ast.Assign | ast.Return))
    )


def _without_flags(*flags: str) -> Callable[[ast.stmt], ast.stmt]:
    class Dropping(ast.NodeTransformer):
        def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
            return ast.copy_location(ast.Constant(0), node) if node.attr in flags else node

    return lambda node: Dropping().visit(node)


# kind: the module, what is looked for, and what takes its place
NO_FOLLOW = ("O_NOFOLLOW", "O_EXCL")  # of new files: either of them refuses a link
KINDS: dict[str, tuple[str, Callable[[ast.stmt], bool], Callable[[ast.stmt], ast.stmt]]] = {
    "fsync": (STORE, _deletes_call("fsync", "_sync_folder"), _never),
    "fsync of an exchange": (CLEANUP, _deletes_call("sync"), _never),
    "fsync of a file": (FILE_WRITER, _deletes_call("fsync"), _never),
    "fsync of a new directory": (FS, _deletes_call("sync"), _never),
    "write": (FILE_WRITER, _deletes_call("write_all", "pwrite"), _never),
    "no-follow": (FS, _drop_flags(*NO_FOLLOW), _without_flags(*NO_FOLLOW)),
    "checksum": (FILES, _deletes_refusal("CorruptCheckpointError"), _never),
    "digest": (MANIFEST, _deletes_refusal("CorruptCheckpointError"), _never),
    "plan: flush, fsync": (PLAN, _deletes_call("flush", "fsync", "write", "fsync_folder"), _never),
}


def source_of(module: str) -> Path:
    return ROOT / Path(*module.split(".")).with_suffix(".py")


def _statements(tree: ast.Module) -> Iterator[tuple[str, list[ast.stmt], int]]:
    """Every statement with its list and place in it, and the function that it lies in; in source order."""

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, list[ast.stmt], int]]:
        inside = node.name if isinstance(node, ast.FunctionDef) else function
        for name in ("body", "orelse", "finalbody"):
            held = getattr(node, name, None)
            if isinstance(held, list):
                for index, one in enumerate(held):
                    yield inside, held, index
                    yield from walk(one, inside)
        for handler in getattr(node, "handlers", ()):
            yield from walk(handler, inside)

    return walk(tree, "")


def find_all() -> list[Mutation]:
    """All that can be deleted."""
    found = []
    for kind, (module, is_due, _) in KINDS.items():
        tree = ast.parse(source_of(module).read_text())
        places = [(function, held[i]) for function, held, i in _statements(tree) if is_due(held[i])]
        for index, (function, node) in enumerate(places):
            text = ast.unparse(node).splitlines()[0]
            found.append(Mutation(kind, module, index, f"{function or 'module'}: {text}", node.lineno))
    return found


def mutated(kind: str, index: int) -> ast.Module:
    """The module's tree without its ``index``-th place of this kind."""
    module, is_due, change = KINDS[kind]
    tree = ast.parse(source_of(module).read_text())
    held, i = [(held, i) for _, held, i in _statements(tree) if is_due(held[i])][index]
    held[i] = change(held[i])
    return ast.fix_missing_locations(tree)


# In the test run


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        kind, index = json.loads(os.environ[ENVIRONMENT])
        return compile(mutated(kind, index), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module: str) -> None:
        self._module = module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        return importlib.util.spec_from_loader(fullname, _Loader(fullname, str(source_of(fullname))))


def install() -> None:
    """What the environment names is deleted when it is imported."""
    kind, _ = json.loads(os.environ[ENVIRONMENT])
    module = KINDS[kind][0]
    if module in sys.modules:
        raise RuntimeError(f"{module} was imported before it could be changed")
    sys.meta_path.insert(0, _Finder(module))


# From outside


def is_noticed(mutation: Mutation | None, suite: tuple[str, str]) -> bool:
    """Whether this part of the suite fails without what the mutation deletes.

    Raises:
        RuntimeError: it cannot be run at all.
    """
    where, which = suite
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    env.pop("PYTEST_XDIST_WORKER", None)
    # Without torch, which nothing but the configuration needs here.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--noconftest",
        "-xqp",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-k",
        which,
    ]
    if mutation is not None:
        env[ENVIRONMENT] = json.dumps([mutation.kind, mutation.index])
        command += ["-p", "tests.faults.mutations_plugin"]
    done = subprocess.run([*command, *where.split()], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{mutation}: pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return done.returncode == 1


def try_all(mutations: Sequence[Mutation], processes: int = 1) -> list[str]:
    """Those that nothing noticed."""
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        found = pool.map(lambda mutation: is_noticed(mutation, SUITE[mutation.module]), mutations)
        return [f"{m.kind}: {m.module}:{m.line} {m.place}" for m, red in zip(mutations, found, strict=True) if not red]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="what can be deleted; delete nothing")
    parser.add_argument("--kind", default=None, choices=sorted(KINDS))
    parser.add_argument("--processes", type=int, default=1)
    chosen = parser.parse_args()
    mutations = [m for m in find_all() if chosen.kind in (None, m.kind)]
    if chosen.list:
        sys.stdout.write("".join(f"{m.kind:20} {m.module}:{m.line} {m.place}\n" for m in mutations))
        return 0
    problems = [f"green without {one}" for one in try_all(mutations, chosen.processes)]
    for module in sorted({m.module for m in mutations}):
        if is_noticed(None, SUITE[module]):
            problems.append(f"red although nothing was deleted: {SUITE[module]}")
    sys.stdout.write(json.dumps({"tried": len(mutations), "problems": problems}) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
