"""Extra state: what goes in comes out, equal and of the same type; garbage is refused, never executed."""

from __future__ import annotations

import collections
import datetime
import enum
import math
import pathlib
import random
import subprocess
import sys
import tracemalloc
import zoneinfo
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler, swa_utils

from checkflow.core.errors import CorruptCheckpointError, UnsupportedError
from checkflow.core.state import memory_order
from checkflow.runtime.format import codec
from checkflow.runtime.format.codec import MAX_DEPTH, decode, encode
from checkflow.runtime.format.layout import STORED_TYPES


def assert_same(one: Any, other: Any) -> None:
    """Equal, and of equal types at every level; NaN equals NaN, 0.0 does not equal -0.0."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.requires_grad == other.requires_grad
        assert encode(one) == encode(other)
    elif isinstance(one, np.ndarray | np.generic):
        assert one.dtype.str == other.dtype.str
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()
    elif isinstance(one, dict):
        assert len(one) == len(other)
        for (key, value), (other_key, other_value) in zip(one.items(), other.items(), strict=True):
            assert_same(key, other_key)
            assert_same(value, other_value)
        if isinstance(one, collections.defaultdict):
            assert one.default_factory is other.default_factory
    elif isinstance(one, list | tuple | collections.deque):
        assert len(one) == len(other)
        for item, other_item in zip(one, other, strict=True):
            assert_same(item, other_item)
        if isinstance(one, collections.deque):
            assert one.maxlen == other.maxlen
    elif isinstance(one, float):
        assert (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    elif isinstance(one, complex):
        assert_same([one.real, one.imag], [other.real, other.imag])
    else:
        assert one == other
        assert repr(one) == repr(other) or isinstance(one, set | frozenset)


VALUES: list[Any] = [
    None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 10**400, -(10**400), 2**127, -128,
    0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1e308, "", "ü", "\udc80", "a\0b", b"", b"\xff", bytearray(b"xy"),
    [], [[]], (), ((),), {}, {"": None}, {1: "one", "1": 1, (2, 3): [4], None: 5, False: 6, 2.5: 7, b"k": 8},
    {"__ext__": 1}, {frozenset({1, 2}): {3}}, set(), {1, "a", (2,)}, frozenset({frozenset()}), {math.inf, -1},
    complex(1, -0.0), complex(math.inf, 2), range(0), range(3, -9, -2), slice(None, 5, None),
    collections.deque([1, (2,)], maxlen=3), collections.deque(), collections.Counter({3: 2, 5: -1}),
    collections.OrderedDict([("b", 1), ("a", 2)]), collections.defaultdict(list, {"x": [1]}),
    collections.defaultdict(None),
    collections.defaultdict(int, {1: 2}), pathlib.Path("a/b"), datetime.date(2024, 2, 29),
    datetime.datetime(2024, 2, 29, 23, 59, 59, 999999, fold=1), datetime.datetime(1, 1, 1, tzinfo=datetime.UTC),
    datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=-3), "X")),
    datetime.time(1, 2, 3, tzinfo=datetime.timezone(datetime.timedelta(minutes=90))), datetime.timedelta(-1, 2, 3),
    datetime.timezone(datetime.timedelta(hours=1), "UTC+01:00"), datetime.timezone(datetime.timedelta(hours=1)),
    np.float64(1.5), np.float32("nan"), np.int8(-3), np.bool_(True), np.uint64(2**64 - 1), np.complex64(1 + 2j),
    np.str_("häh"), np.str_(""), np.bytes_(b"ab"), np.datetime64("2024-01-01T00:00", "m"), np.datetime64("NaT"),
    np.timedelta64(5, "ns"), np.longdouble(1) / 3, np.arange(6).reshape(2, 3), np.zeros((0, 3), ">f4"), np.array(3.5),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.array(["a", "bcd"]), np.array([], "<U0"), np.array([True]),
    torch.Size([]), torch.Size([2, 3]), torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 3),
    torch.tensor(1.5), torch.zeros(0, 3), torch.randn(3, 4).t(), torch.ones(2, requires_grad=True),
    torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False), torch.ones(1).expand(5),
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.tensor([1 + 2j]).conj(),
    torch.tensor([1 + 2j]).conj().imag, codec.Stored("model/x"), codec.Stored("o/x.Q.0", True, True, True, True),
    {codec.Named("optimizer", "x"): 1},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=[f"{n}-{type(value).__name__}" for n, value in enumerate(VALUES)])
def test_value_comes_back(value: Any) -> None:
    for whole in (value, [value], (value,), {"k": value}, {1: value}):
        assert_same(decode(encode(whole)), whole)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 3).t(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.nn.Parameter(torch.randn(5, 2).t()), torch.randn(3, 2, dtype=torch.complex64).t().conj(),
        torch.randn(2, 1, 3, 1).permute(3, 2, 1, 0), torch.randn(4, 3).t().requires_grad_(),
    ],
)  # fmt: skip
def test_a_tensor_comes_back_in_its_order_in_memory(tensor: torch.Tensor) -> None:
    found = decode(encode([tensor]))[0]
    assert memory_order(found) == memory_order(tensor)
    assert torch.equal(found, tensor)
    assert (type(found), found.requires_grad) == (type(tensor), tensor.requires_grad)


def test_a_dictionary_is_marked_where_older_readers_cannot_decode_it() -> None:
    plain = {"a": torch.ones(2, 3), "b": 1}
    assert encode(plain, marks=None) == encode(plain)
    assert not codec.is_newer(encode(plain))
    for value in (torch.ones(2, 3).t(), codec.Stored("model/x"), {codec.Named("o", "x"): 1}):
        data = encode({"a": [value]}, marks=None)
        assert codec.is_newer(data[: codec.HEAD_BYTES])
        assert_same(decode(data), {"form": 2, "a": [value]})
        assert not codec.is_newer(encode({"a": [value]}))
    assert codec.is_newer(encode(plain, marks=True))


@pytest.mark.parametrize("dtype", sorted(STORED_TYPES))
def test_every_dtype(dtype: str) -> None:
    size = STORED_TYPES[dtype].element_bytes
    data = torch.arange(12 * size, dtype=torch.uint8) % (2 if dtype == "bool" else 251)
    for tensor in (data.view(getattr(torch, dtype)).reshape(3, 4), data[:size].view(getattr(torch, dtype))):
        back = decode(encode(tensor))
        assert back.dtype is tensor.dtype
        assert back.shape == tensor.shape
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
    | st.dates() | st.datetimes() | st.timedeltas()
)  # fmt: skip
keys = st.none() | st.integers() | st.text() | st.tuples(st.integers(), st.text()) | st.binary()
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(keys, inner).map(collections.OrderedDict)
        | st.sets(keys)
        | st.frozensets(keys)
        | st.lists(inner).map(collections.deque)
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(values)
def test_any_value_comes_back(value: Any) -> None:
    assert_same(decode(encode(value)), value)


def _momentum() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.MultiStepLR(o, [3])], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05),
}  # fmt: skip


def test_every_scheduler_is_in_the_table() -> None:
    found = {
        name
        for module in (lr_scheduler, swa_utils)
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert found - {"LRScheduler"} == SCHEDULERS.keys()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_goes_on_where_it_was(name: str) -> None:
    def advance(scheduler: Any, count: int) -> list[float]:
        for _ in range(count):
            scheduler.optimizer.step() if hasattr(scheduler, "optimizer") else None
            scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
        return [group["lr"] for group in optimizer.param_groups]

    optimizer = _momentum()
    scheduler = SCHEDULERS[name](optimizer)
    advance(scheduler, 3)
    saved = {"scheduler": scheduler.state_dict(), "groups": optimizer.state_dict()["param_groups"]}
    restored = decode(encode(saved))
    assert_same(restored, saved)
    expected = advance(scheduler, 4)
    optimizer = _momentum()
    scheduler = SCHEDULERS[name](optimizer)
    scheduler.load_state_dict(restored["scheduler"])
    optimizer.load_state_dict({"state": {}, "param_groups": restored["groups"]})
    assert advance(scheduler, 4) == expected


def test_random_states_go_on_where_they_were() -> None:
    saved = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "numpy_generator": np.random.default_rng(3).bit_generator.state,
        "torch": torch.get_rng_state(),
        "generator": torch.Generator().manual_seed(4).get_state(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
    }
    restored = decode(encode(saved))
    assert_same(restored, saved)
    expected = random.random(), float(np.random.rand()), torch.rand(2).tolist()
    random.setstate(restored["python"])
    np.random.set_state(restored["numpy"])
    torch.set_rng_state(restored["torch"])
    assert (random.random(), float(np.random.rand()), torch.rand(2).tolist()) == expected
    generator = torch.Generator()
    generator.set_state(restored["generator"])
    assert torch.equal(torch.rand(3, generator=generator), torch.rand(3, generator=torch.Generator().manual_seed(4)))


class _Colour(enum.IntEnum):
    RED = 1


class _Text(str):
    __slots__ = ()


Point = collections.namedtuple("Point", "x y")

REFUSED: list[tuple[Any, str]] = [
    ({"scheduler": {"foo": [0, 1, 2, lambda: 0]}}, r"state\['scheduler'\]\['foo'\]\[3\]: the function"),
    ({1: {(2, 3): object()}}, r"state\[1\]\[\(2, 3\)\]: an object of type object"),
    ([int], r"state\[0\]: the function or class int"),
    ({_Colour.RED: 1}, "_Colour"),
    ([_Colour.RED], r"state\[0\]: an object of type .*_Colour"),
    (_Text("x"), "_Text"),
    (Point(1, 2), "Point"),
    (torch.Generator(), "Generator"),
    (torch.zeros(2, device="meta"), "meta"),
    (torch.eye(2).to_sparse(), "sparse"),
    (np.array([object()]), "dtype object"),
    (np.zeros(2, [("a", "i4")]), "dtype"),
    (np.ma.masked_array([1]), "MaskedArray"),
    (collections.defaultdict(lambda: 0), "factory"),
    (datetime.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")), r"^state: a time whose zone"),
    (1 << (1 << 20), "integer"),
    ({"a": {1, frozenset({Point(1, 2)})}}, r"state\['a'\].*member"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_unknown_types_are_refused_by_their_path(value: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        encode(value)
    assert "\n" not in str(caught.value)


def test_nesting_is_bounded_and_cycles_end() -> None:
    def nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
        value: Any = 1
        for _ in range(depth):
            value = wrap(value)
        return value

    for wrap in (lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: {1: v}, lambda v: frozenset([v])):
        assert_same(decode(encode(nested(MAX_DEPTH, wrap))), nested(MAX_DEPTH, wrap))
        with pytest.raises(UnsupportedError, match="deep"):
            encode(nested(MAX_DEPTH + 1, wrap))
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(UnsupportedError, match="contains itself"):
        encode(cycle)


def test_decoding_refuses_what_encoding_never_writes() -> None:
    deep = 1
    for _ in range(10_000):
        deep = msgpack.packb(msgpack.ExtType(1, msgpack.packb([deep]) if isinstance(deep, int) else b"\x91" + deep))
    for data in (
        b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 100_000, deep, encode([1]) + b"\0",
        msgpack.packb(msgpack.ExtType(127, b"")), msgpack.packb(msgpack.Timestamp(5)), msgpack.packb({1: 2}),
        msgpack.packb(msgpack.ExtType(48, msgpack.packb(["|O8", [1], b"12345678"]))),
        msgpack.packb(msgpack.ExtType(48, msgpack.packb(["<f4", [2**40], b""]))),
        msgpack.packb(msgpack.ExtType(64, msgpack.packb(["float32", [-1, -1], False, b"1234"]))),
        msgpack.packb(msgpack.ExtType(64, msgpack.packb(["load", [1], False, b"1234"]))),
        msgpack.packb(msgpack.ExtType(67, msgpack.packb("compile"))),
        msgpack.packb(msgpack.ExtType(69, msgpack.packb([64, [0, 0], "int8", [1, 2], False, b"12"]))),
        msgpack.packb(msgpack.ExtType(69, msgpack.packb([66, [0], "int8", [1], False, b"1"]))),
        msgpack.packb(msgpack.ExtType(69, msgpack.packb([64, [1, 0], "int8", [-1, -1], False, b"1"]))),
        msgpack.packb(msgpack.ExtType(70, msgpack.packb(["x", 1, False, False, False]))),
        msgpack.packb(msgpack.ExtType(71, msgpack.packb(["x"]))),
        msgpack.packb(msgpack.ExtType(8, msgpack.packb(["eval"]))),
    ):  # fmt: skip
        with pytest.raises(CorruptCheckpointError) as caught:
            decode(data, name="state.msgpack")
        assert "state.msgpack" in str(caught.value)
        assert "\n" not in str(caught.value)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_harmless(data: bytes) -> None:
    try:
        decode(data)
    except CorruptCheckpointError:
        return


def test_mutated_bytes_are_refused_or_harmless() -> None:
    source = random.Random(0)
    good = encode(VALUES)
    refused = 0
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(source.randint(1, 4)):
            data[source.randrange(len(data))] = source.randrange(256)
        if source.random() < 0.2:
            del data[source.randrange(len(data)) :]
        try:
            decode(bytes(data))
        except CorruptCheckpointError:
            refused += 1
    assert 300 < refused < 3000


def test_encoding_is_repeatable() -> None:
    program = "from checkflow.runtime.format.codec import encode; print(encode({'a', 'b', 'c', 1, 2}).hex())"
    seen = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(seen) == 1


def test_plain_values_need_no_checkflow_to_be_read() -> None:
    value = {"lr": 0.1, "steps": [1, 2], "name": "x", "none": None, "raw": b"y"}
    assert msgpack.unpackb(encode(value)) == value


@pytest.mark.parametrize("size", [0, 1, 14])
def test_an_entry_is_added_to_what_is_encoded(size: int) -> None:
    value: dict[str, Any] = {f"key {i}": (i, [None]) for i in range(size)}
    data = codec.with_entry(codec.encode(value), "late", (1, {2: "three"}))
    assert codec.decode(data) == {**value, "late": (1, {2: "three"})}
    assert data == codec.encode({**value, "late": (1, {2: "three"})})


@pytest.mark.parametrize("value", [{str(i): i for i in range(15)}, [1], {1: 2}, "text"])
def test_an_entry_is_added_to_small_dictionaries_alone(value: Any) -> None:
    with pytest.raises(ValueError, match="less than 15"):
        codec.with_entry(codec.encode(value), "late", 1)


# What little data may claim of memory

_TENSOR = msgpack.packb(["float32", [0], False, b""])
_DENSE = [
    b"\x90", b"\x80", b"\x81\xa0\xc0", b"\xd4\x01\x90", b"\xd4\x03\x90", b"\xd5\x03\x91\x01", b"\xd4\x06\x90",
    b"\xd4\x07\x90", b"\xd5\x08\x91\xc0", b"\xd4\x15\xa0", b"\xd5\x05\x91\xc0",
    bytes((0xC7, len(_TENSOR), codec.TENSOR)) + _TENSOR,
]  # fmt: skip


@pytest.mark.parametrize("item", _DENSE, ids=bytes.hex)
def test_small_containers_take_no_more_memory_than_a_budget(item: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that have more are refused before they are built, however they are nested; 129 times the data, without."""
    monkeypatch.setattr(codec, "_DECODED_BYTES", 1 << 20)
    count = 600_000 // len(item)
    lists = b"\xdd" + count.to_bytes(4, "big") + item * count
    tuples = b"\xc9" + len(lists).to_bytes(4, "big") + bytes((codec.TUPLE,)) + lists
    for data in (lists, tuples):
        tracemalloc.start()
        with pytest.raises(CorruptCheckpointError, match="far more memory than its size"):
            codec.decode(data)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 40 * len(data)


def test_lengths_that_are_only_claimed_are_refused() -> None:
    nested = (b"\xdd" + (1 << 22).to_bytes(4, "big")) * 500
    with pytest.raises(CorruptCheckpointError):
        codec.decode(nested + b"\x00" * (1 << 22))


@pytest.mark.parametrize(
    "values",
    [
        [[]] * 50_000, [{}] * 50_000, [{"a": 1}] * 50_000, [(1, 2)] * 50_000, [{1}] * 50_000,
        dict.fromkeys(range(50_000)),
        [collections.deque([1])] * 20_000, [np.float32(1)] * 50_000, [np.zeros(1)] * 20_000, [torch.zeros(1)] * 5_000,
        [datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)] * 20_000, [slice(1)] * 20_000, [torch.Size([1])] * 20_000,
        [torch.zeros(2, 3).t()] * 5_000, [codec.Stored("x")] * 20_000, [{codec.Named("x", "y"): 1}] * 20_000,
        [collections.Counter("ab")] * 20_000, [collections.defaultdict(int, a=1)] * 20_000, set(range(50_000)),
    ],
    ids=lambda values: type(next(iter(values))).__name__,
)  # fmt: skip
def test_what_is_encoded_is_within_the_budget_of_decoding(values: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a job would save what it cannot go on from: what decoding counts is never more than what encoding counted."""
    spent: list[codec._Budget] = []

    class Noted(codec._Budget):
        def __init__(self, *bounds: float) -> None:
            super().__init__(*bounds)
            spent.append(self)

    monkeypatch.setattr(codec, "_Budget", Noted)
    codec.decode(codec.encode(values))
    encoding, decoding = spent
    assert 0 < decoding.spent_bytes <= encoding.spent_bytes
    with pytest.raises(UnsupportedError, match="too many small containers"):
        codec.encode([[]] * 50_000, most_bytes=0)
