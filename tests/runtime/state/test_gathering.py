"""Tensors anywhere in a job's state are state tensors, in their order in memory, and come back as they were."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from checkflow import Variables
from checkflow.core.state import collect_state, map_leaves, memory_order
from checkflow.runtime.format import codec
from checkflow.runtime.format.manifest import EXTRA, MANIFEST
from checkflow.runtime.state.collect import StateWalk, capture_extra
from checkflow.runtime.store.reader import open_checkpoint
from checkflow.runtime.weights.exporter import state_dicts
from tests.support.oracle import same_bits
from tests.support.saved_jobs import make_job, restore, save

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8)


def _life() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, torch.optim.Adam(model.parameters())


@st.composite
def _tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    dtype = draw(st.sampled_from(DTYPES))
    found = torch.randint(0, 2, [shape[d] for d in order]).to(dtype)
    found = found.permute([order.index(d) for d in range(len(shape))])
    kind = draw(st.sampled_from(("plain", "gaps", "expanded", "parameter", "grad", "conjugated")))
    if kind == "gaps" and shape:
        found = torch.cat([found, found])[::2]
    elif kind == "expanded":
        found = found.expand(2, *found.shape)
    elif kind == "parameter" and dtype.is_floating_point:
        found = nn.Parameter(found, requires_grad=draw(st.booleans()))
    elif kind == "grad" and dtype.is_floating_point:
        found = found.detach().requires_grad_()
    elif kind == "conjugated" and dtype.is_complex:
        found = found.conj()
    return found


def _structures(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.sampled_from(("a", "b", "a.b", 0, 1, "0", (0, 1), True))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.lists(inner, max_size=3).map(lambda items: collections.deque(items, 4)),
            st.dictionaries(keys, inner, max_size=3),
            st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
            st.dictionaries(keys, inner, max_size=3).map(lambda items: collections.defaultdict(list, items)),
        ),
        max_leaves=8,
    )


class _Kept:
    """An object of the user's that gives a structure, and gets one."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def _leaves(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_leaves(value, None, lambda _, tensor: found.append(tensor))
    return found


def _assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert [*found] == [*expected]
        for key, value in expected.items():
            _assert_same(found[key], value)
        assert getattr(found, "default_factory", None) is getattr(expected, "default_factory", None)
    elif isinstance(expected, list | tuple | collections.deque):
        assert len(found) == len(expected)
        assert getattr(found, "maxlen", None) == getattr(expected, "maxlen", None)
        for one, other in zip(found, expected, strict=True):
            _assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert found.requires_grad == expected.requires_grad
        assert same_bits(found.resolve_conj(), expected.resolve_conj())
        if expected.numel() and (order := memory_order(expected)) is not None:
            assert memory_order(found) == order
    else:
        assert found == expected


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_structures_come_back_with_order_types_and_ties(data: st.DataObject, tmp_path_factory: Any) -> None:
    directory = tmp_path_factory.mktemp("saved")
    model, optimizer = _life()
    made = data.draw(st.lists(_tensors(), max_size=4))
    whole = torch.arange(12.0).reshape(3, 4)
    shared = [*made, whole, whole[:2], whole.t(), model.weight, model.weight.detach(), model.weight[:1]]
    leaves = st.one_of(st.sampled_from(shared), st.sampled_from((None, 3, "text", 2.5)))
    value = data.draw(_structures(leaves))
    job = make_job(model, optimizer, {"kept": _Kept(value)})
    path = save(job, directory)
    model, optimizer = _life()
    with torch.no_grad():
        model.weight.zero_()
    kept = _Kept(None)
    job.objects["kept"] = _Kept(None)
    restore(make_job(model, optimizer, {"kept": kept}), directory)
    _assert_same(kept.value, value)
    before, after = _leaves(value), _leaves(kept.value)
    for one, tensor in zip(before, after, strict=True):
        tied = one.data_ptr() == shared[-3].data_ptr() and one.shape == shared[-3].shape
        assert (tensor.data_ptr() == model.weight.data_ptr()) == (tied and one.numel() > 0)
    with open_checkpoint(path) as checkpoint:
        checkpoint.verify()
        exported = state_dicts(checkpoint)["state"]["kept"]
    _assert_same(exported, value)


class Average:
    """An average of parameters, as libraries keep it: ``state_dict()`` returns the tensors themselves."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [parameter.detach().clone() for parameter in model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"decay": 0.9, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, saved in zip(self.shadow, state["shadow"], strict=True):
            mine.copy_(saved)


def test_an_objects_tensors_lie_in_a_file_of_tensors(tmp_path: Path) -> None:
    model = nn.Linear(300, 300)
    average = Average(model)
    path = save(make_job(model, torch.optim.SGD(model.parameters()), {"average": average}), tmp_path)
    assert (path / EXTRA).stat().st_size < 2000
    with open_checkpoint(path) as checkpoint:
        assert {name for name in checkpoint.tensors if name.startswith("job-state/")} == {
            "job-state/average.shadow.0", "job-state/average.shadow.1",
        }  # fmt: skip
    other = Average(nn.Linear(300, 300))
    restore(make_job(model, torch.optim.SGD(model.parameters()), {"average": other}), tmp_path)
    assert all(map(torch.equal, other.shadow, average.shadow))


def test_an_extra_state_of_a_module_is_stored_likewise(tmp_path: Path) -> None:
    class Noted(nn.Linear):
        note = torch.arange(6.0).reshape(2, 3).t()

        def get_extra_state(self) -> Any:
            return {"note": self.note}

        def set_extra_state(self, state: Any) -> None:
            self.note = state["note"]

    model = nn.Sequential(Noted(2, 2))
    save(make_job(model, torch.optim.SGD(model.parameters())), tmp_path)
    other = nn.Sequential(Noted(2, 2))
    other[0].note = torch.zeros(1)
    restore(make_job(other, torch.optim.SGD(other.parameters())), tmp_path)
    assert torch.equal(other[0].note, Noted.note)  # type: ignore[arg-type]
    assert other[0].note.stride() == (1, 3)  # type: ignore[operator]


def test_only_what_needs_a_newer_reader_says_so(tmp_path: Path) -> None:
    """Earlier releases read a checkpoint without such tensors, and refuse others by their version."""
    model, optimizer = _life()
    plain = save(make_job(model, optimizer, {"n": Variables(n=3)}), tmp_path / "plain")
    assert b'"version":1,' in (plain / MANIFEST).read_bytes()
    newer = save(make_job(model, optimizer, {"t": Variables(t=torch.ones(2))}), tmp_path / "newer")
    assert b'"version":2,' in (newer / MANIFEST).read_bytes()


def _walk() -> tuple[nn.Module, torch.optim.Optimizer, StateWalk]:
    model, optimizer = _life()
    optimizer.state[model.weight] = {"step": 1, "Q": [torch.ones(2), None], "other": (torch.zeros(2), {"x": 3})}
    return model, optimizer, StateWalk({"model": model}, {"optimizer": optimizer})


def _changes() -> Iterator[tuple[str, Any]]:
    yield "added", lambda table: table["Q"].append(torch.ones(1))
    yield "replaced", lambda table: table["Q"].__setitem__(0, torch.ones(2))
    yield "by another list", lambda table: table.__setitem__("Q", [torch.ones(2), None])
    yield "where none was", lambda table: table.__setitem__("step", [torch.ones(1)])
    yield "in a dictionary", lambda table: table["other"][1].__setitem__("x", torch.ones(1))
    yield "resized", lambda table: table["Q"][0].resize_(5)
    yield "moved", lambda table: setattr(table["Q"][0], "data", torch.ones(2))
    yield "removed", lambda table: table.pop("other")


@pytest.mark.every_case
@pytest.mark.parametrize(("what", "change"), list(_changes()))
def test_a_walk_notices_what_happens_in_lists(what: str, change: Any) -> None:
    model, optimizer, walk = _walk()
    before = walk.current()
    assert walk.current() is before
    assert walk.current(whole=False) is before
    names = {item.name for item in before.tensors if item.inside}
    assert names == {"optimizer/weight.Q.0", "optimizer/weight.other.0"}
    change(optimizer.state[model.weight])
    after = walk.current()
    assert after is not before, what
    held = {item.name: item.tensor for item in collect_state({"model": model}, {"optimizer": optimizer}).tensors}
    assert {item.name: item.tensor.data_ptr() for item in after.tensors} == {n: t.data_ptr() for n, t in held.items()}


def test_a_list_with_the_same_tensors_is_the_same_state() -> None:
    """Some optimizers make their lists anew at each step."""
    model, optimizer, walk = _walk()
    before = walk.current()
    table = optimizer.state[model.weight]
    table["Q"] = [*table["Q"]]
    assert walk.current() is before


def test_other_memory_of_the_same_form_is_another_state_with_the_same_base() -> None:
    _, optimizer, walk = _walk()
    kept = Variables(hidden=torch.zeros(2, 3).t())
    job = {"kept": kept}
    base = walk.current()
    capture_extra(walk, {"optimizer": optimizer}, job)
    first = walk.captured
    assert [item.name for item in first.given] == ["job-state/kept.hidden"]
    capture_extra(walk, {"optimizer": optimizer}, job)
    assert walk.captured is first
    kept.hidden = torch.ones(2, 3).t()
    capture_extra(walk, {"optimizer": optimizer}, job)
    assert walk.captured is not first
    assert walk.captured.base is first.base is base


def test_what_changes_its_form_again_and_again_is_saved_by_value(tmp_path: Path) -> None:
    """Each other form makes new files' headers, and maybe larger staging buffers."""
    model, optimizer = _life()
    kept = Variables(grows=[], stays=torch.ones(2, 3).t())
    job = make_job(model, optimizer, {"kept": kept})
    named = []
    for step in range(1, 9):
        kept.grows.append(torch.full((2, step + 1), float(step)).t())
        path = save(job, tmp_path, step)
        with open_checkpoint(path) as checkpoint:
            named.append(sum(name.startswith("job-state/") for name in checkpoint.tensors))
    assert named[:2] == [2, 3]
    assert named[-1] == 1  # what stays
    other = Variables(grows=[], stays=torch.ones(1))
    restore(make_job(model, optimizer, {"kept": other}), tmp_path)
    assert [one.stride() for one in other.grows] == [one.stride() for one in kept.grows]
    assert all(map(torch.equal, other.grows, kept.grows))
    assert other.stays.stride() == (1, 3)


def test_lists_of_optimizer_state_that_overlap_other_state_are_saved_by_value(tmp_path: Path) -> None:
    model, optimizer = _life()
    whole = torch.arange(6.0).reshape(2, 3)
    optimizer.state[model.weight] = {"whole": whole, "parts": [whole[0], whole, whole.t(), model.bias]}
    save(make_job(model, optimizer), tmp_path)
    model, optimizer = _life()
    restore(make_job(model, optimizer), tmp_path)
    table = optimizer.state[model.weight]
    assert table["parts"][1] is table["whole"]
    assert table["parts"][3] is model.bias
    assert torch.equal(table["parts"][0], whole[0])
    assert table["parts"][2].stride() == (1, 3)


def test_a_reference_to_what_the_files_lack_is_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = _life()
    lost = codec.Stored("job-state/kept.lost", alone=True)
    save(make_job(model, optimizer, {"kept": _Kept({"lost": lost})}), tmp_path)
    assert restore(make_job(model, optimizer, {"kept": _Kept(None)}), tmp_path) is None
    assert "lacks the tensor job-state/kept.lost, which its extra state names" in caplog.text


def test_places_of_one_name_in_optimizer_state_have_values_of_their_own(tmp_path: Path) -> None:
    model, optimizer = _life()
    optimizer.state[model.weight].update(Q={1: torch.ones(2), "1": torch.zeros(2)}, exp=torch.full((3, 4), 2.0))
    optimizer.state["weight"] = {"exp": torch.full((3, 4), 3.0)}
    save(make_job(model, optimizer), tmp_path)
    model, optimizer = _life()
    restore(make_job(model, optimizer), tmp_path)
    found: dict[Any, Any] = dict(optimizer.state)
    _assert_same(found[model.weight]["Q"], {1: torch.ones(2), "1": torch.zeros(2)})
    _assert_same([found[model.weight]["exp"], found["weight"]["exp"]], [torch.full((3, 4), one) for one in (2.0, 3.0)])


def test_many_tensors_in_one_storage_are_gathered_in_linear_time() -> None:
    model, optimizer = _life()
    rows, optimizer.state[model.weight]["Q"] = torch.zeros(20000, 2).unbind(), list(torch.zeros(20000, 2).unbind())
    job = make_job(model, optimizer, {"rows": Variables(rows=[*rows, rows[5][:1]])})
    begun = time.process_time()
    job.walk.current()
    saved = capture_extra(job.walk, job.optimizers, job.objects)["job"]["objects"]["rows"]["rows"]
    assert time.process_time() - begun < 20  # 3; it took minutes when each was compared with all others
    assert len(job.walk.captured.tensors) == 40002
    assert torch.is_tensor(saved[-1])  # it overlaps another: by value


def test_lists_and_numbers_that_a_job_has_made_before_it_is_restored_go_as_tensors_do(tmp_path: Path) -> None:
    model, optimizer = _life()
    optimizer.state[model.weight]["kept"] = 1
    save(make_job(model, optimizer), tmp_path)
    model, optimizer = _life()
    optimizer.state[model.weight].update(exp=torch.ones(3, 4), Q=[torch.ones(2)], count=5, kept=7)
    optimizer.state[model.bias]["count"] = 5
    optimizer.state["whole"] = [torch.ones(2)]
    restore(make_job(model, optimizer), tmp_path)
    assert {key: table for key, table in optimizer.state.items() if table} == {model.weight: {"kept": 1}}


def test_a_growing_variable_leaves_those_beside_it_in_files_of_tensors() -> None:
    model, optimizer = _life()
    kept = Variables(large=torch.zeros(50), grows=[torch.zeros(2)], table={})
    job = make_job(model, optimizer, {"kept": kept})
    for number in range(8):
        capture_extra(job.walk, job.optimizers, job.objects)
        kept.grows.append(torch.zeros(2))
        kept.table[number] = torch.zeros(2)
    capture_extra(job.walk, job.optimizers, job.objects)
    assert [one.name for one in job.walk.captured.given] == ["job-state/kept.large"]


def test_all_of_an_object_whose_entries_come_and_go_is_saved_by_value() -> None:
    model, optimizer = _life()
    kept = _Kept({})
    job = make_job(model, optimizer, {"kept": kept})
    for number in range(6):
        kept.value = {**kept.value, f"step {number}": torch.zeros(2)}
        capture_extra(job.walk, job.optimizers, job.objects)
    assert not job.walk.captured.given
