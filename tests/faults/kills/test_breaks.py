"""What a break takes away of the runtime is there: one that missed would break nothing, or fail by its own error."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.kills import breaks as kill_breaks


def taken(function: ast.FunctionDef) -> Iterator[str]:
    """The attributes that it puts others in the place of."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield ast.unparse(node)


BREAKS = [
    node
    for node in ast.parse(Path(kill_breaks.__file__).read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name in kill_breaks.BREAKS
]


@pytest.mark.parametrize("function", BREAKS, ids=lambda function: function.name)
def test_what_a_break_takes_away_is_there(function: ast.FunctionDef) -> None:
    names = dict(vars(kill_breaks))
    for node in ast.walk(function):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {
                one.asname or one.name: importlib.import_module(f"{node.module}.{one.name}") for one in node.names
            }
    replaced = list(taken(function))
    assert replaced
    for attribute in replaced:
        eval(attribute, names)
