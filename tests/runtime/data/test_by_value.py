"""Small batches go from a worker as bytes: what arrives is what was sent, and everything else goes torch's way."""

from __future__ import annotations

import collections
import enum
import functools
import multiprocessing
import pickle
import select
import weakref
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import TensorDataset
from torch.utils.data._utils.collate import default_collate_fn_map

from checkflow.runtime.data import feed
from checkflow.runtime.data.by_value import MOST_BYTES, Pickled, by_value
from checkflow.runtime.data.loader import DataLoader
from checkflow.runtime.format.layout import STORED_TYPES
from checkflow.runtime.system.aligned_memory import no_collection


def arrived(batch: Any) -> Any:
    """What comes out at the other end, which was sent as bytes."""
    message = by_value(batch, shared=True)
    assert isinstance(message, Pickled)
    return pickle.loads(ForkingPickler.dumps((3, message)))[1]


def values(tensor: torch.Tensor) -> bytes:
    """All of the memory that a tensor lies in."""
    return bytes(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy())


def same(one: Any, other: Any) -> bool:
    """Types, values, places in memory, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return values(one) == values(other) and (
            (one.dtype, one.shape, one.stride(), one.storage_offset())
            == (other.dtype, other.shape, other.stride(), other.storage_offset())
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same([*one], [*other]) and same([*one.values()], [*other.values()])
    return repr(one) == repr(other)  # of numbers that are none, and -0.0, too


def random_tensor(size_bytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8).view(dtype)


DTYPES = [dtype for name in STORED_TYPES if isinstance(dtype := getattr(torch, name, None), torch.dtype)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_every_dtype_arrives(dtype: torch.dtype) -> None:
    tensor = random_tensor(48, dtype) if dtype != torch.bool else torch.tensor([True, False, True])
    found = arrived(tensor)
    assert same(found, tensor)
    assert not found.is_shared()


TENSORS = {
    "without dimensions": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0),
    "of no rows": lambda: torch.zeros(0, 3),
    "turned": lambda: torch.randn(3, 4).t(),
    "channels_last": lambda: torch.randn(1, 3, 2, 2).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(3, 1).expand(3, 5),
    "a part": lambda: torch.randn(20)[3:11:2],
    "shared": lambda: torch.randn(3).share_memory_(),
    "of inference": lambda: torch.inference_mode()(torch.ones)(3),
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_tensors_of_every_shape_arrive(make: Any) -> None:
    tensor = make()
    found = arrived([tensor])[0]
    assert same(found, tensor)
    assert not found.is_shared()


def test_what_arrives_can_be_changed_and_grow() -> None:
    sent = torch.arange(4)
    (found,) = arrived((sent,))
    found += 1
    assert found.tolist() == [1, 2, 3, 4]
    assert sent.tolist() == [0, 1, 2, 3]
    assert found.resize_(1000).shape == (1000,)
    assert found.data_ptr() % 16 == 0  # as all of torch's memory


def test_what_shares_memory_does_so_afterwards() -> None:
    memory = torch.arange(10)
    once, twice = torch.ones(2), [torch.zeros(1)]
    found = arrived({"begin": memory[:5], "end": memory[3:], "one": (once, once), "lists": [twice, twice]})
    found["begin"][3] = 77
    assert found["end"][0] == 77
    assert found["one"][0] is found["one"][1]
    assert found["lists"][0] is found["lists"][1]
    found["one"][0].zero_()
    assert memory.tolist() == list(range(10))
    assert once.tolist() == [1, 1]


ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5),
    st.lists(st.integers(0, 3), max_size=3).map(lambda shape: torch.randn(shape)),
)  # fmt: skip
BATCHES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(BATCHES)
def test_batches_arrive_as_they_were_sent(batch: Any) -> None:
    batch = [torch.ones(1), batch]
    assume(isinstance(by_value(batch, shared=True), Pickled))  # not where there are too many parts
    assert same(arrived(batch), batch)


# What goes torch's way


class Own(torch.Tensor):
    pass


class Bound:
    pass


Pair = collections.namedtuple("Pair", "x y")
Colour = enum.IntEnum("Colour", "RED")
CYCLE: list[Any] = []
CYCLE.append(CYCLE)
OTHERS = {
    "a parameter": lambda: nn.Parameter(torch.ones(2)),
    "with gradient": lambda: torch.ones(2, requires_grad=True),
    "of a class": lambda: torch.ones(2).as_subclass(Own),
    "conjugated": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.eye(2).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "of no device": lambda: torch.ones(2, device="meta"),
    "large": lambda: torch.ones(2 * MOST_BYTES),
    "a part of something large": lambda: torch.ones(MOST_BYTES + 1, dtype=torch.uint8)[:2],
    "an array": lambda: np.ones(2),
    "a namedtuple": lambda: Pair(1, 2),
    "a dict of another class": lambda: collections.OrderedDict(x=1),
    "an enumeration's": lambda: Colour.RED,
    "the user's own": lambda: Bound(),
    "an error": lambda: ValueError("x"),
    "text": lambda: "x" * (MOST_BYTES + 1),
    "bytes": lambda: bytes(MOST_BYTES + 1),
    "many numbers": lambda: list(range(100)),
    "many keys": lambda: dict.fromkeys(range(60), 0),
    "many in parts": lambda: [[0] * 9] * 12,
    "a cycle": lambda: CYCLE,
    "a large number": lambda: 1 << 8 * MOST_BYTES,
    "of zeros that are nowhere": lambda: torch._efficientzerotensor(2),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested")
def test_everything_else_goes_as_torch_sends_it(make: Any) -> None:
    odd = make()
    assert by_value(odd, shared=True) is odd
    batch = {"x": torch.ones(2), "others": ([odd],)}
    assert by_value(batch, shared=True) is batch


def test_what_has_no_tensor_is_sent_as_it_is() -> None:
    for batch in (3, "text", [], {"x": (1, None)}):
        assert by_value(batch, shared=True) is batch


def test_what_the_user_shares_stays_shared() -> None:
    batch = [torch.ones(2), torch.ones(3).share_memory_()]
    assert by_value(batch, shared=False) is batch
    assert isinstance(by_value(batch[:1], shared=False), Pickled)


def test_a_way_that_the_user_has_for_tensors_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = [torch.ones(2)]
    monkeypatch.setitem(ForkingPickler._extra_reducers, torch.Tensor, lambda tensor: (str, ()))  # type: ignore[attr-defined]
    assert by_value(batch, shared=True) is batch


def test_nothing_is_held_when_it_is_sent() -> None:
    """Without the help of the collector: shared memory is a file that is open."""
    batch = [torch.ones(2).share_memory_(), {"x": torch.zeros(3)}]
    held = [weakref.ref(batch[0]), weakref.ref(batch[1]["x"])]
    with no_collection():
        arrived(batch)
        del batch
        assert [one() for one in held] == [None, None]


@pytest.mark.parametrize("beyond", range(3))
def test_what_goes_by_value_is_sent_in_one_write(monkeypatch: pytest.MonkeyPatch, beyond: int) -> None:
    """Of the largest batch that does, and the ones after it."""
    room = MOST_BYTES - len(pickle.dumps(by_value(torch.empty(0), shared=True))) - 100
    size = next(
        size
        for size in range(room, MOST_BYTES)
        if not isinstance(by_value(random_tensor(size + 1), shared=True), Pickled)
    )
    batch = random_tensor(size + beyond)
    message = by_value(batch, shared=True)
    assert isinstance(message, Pickled) == (beyond == 0)
    written: list[int] = []
    real = Connection._send  # type: ignore[attr-defined] # what puts a message into the pipe

    def send(self: Connection, buffer: Any, *rest: Any) -> None:
        written.append(len(buffer))
        real(self, buffer, *rest)

    monkeypatch.setattr(Connection, "_send", send)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with receiver, sender:
        sender.send_bytes(ForkingPickler.dumps((2**63, message)))
        found = pickle.loads(receiver.recv_bytes())[1]
    assert same(found, batch)
    if beyond == 0:
        assert len(written) == 1
        assert select.PIPE_BUF - 300 < written[0] <= select.PIPE_BUF


# From workers


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_loaders_give_small_batches_by_value_and_large_ones_in_shared_memory(context: str) -> None:
    for features, shared in ((3, False), (MOST_BYTES, True)):
        data = TensorDataset(torch.randn(10, features), torch.arange(10))
        options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": context}
        ours = list(DataLoader(data, 4, **options))
        theirs = list(TorchDataLoader(data, 4, **options))
        assert [[part.tolist() for part in batch] for batch in ours] == [
            [part.tolist() for part in batch] for batch in theirs
        ]
        assert all(batch[0].is_shared() == shared for batch in ours)
        assert all(type(batch) is list for batch in ours)  # as torch collates


class Sharing:
    """Memory that its user shares with the workers."""

    def __init__(self) -> None:
        self.flag = torch.zeros(1).share_memory_()

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.flag


def test_what_a_data_set_shares_is_shared_with_the_main_process() -> None:
    data = Sharing()
    for flag in DataLoader(data, batch_size=None, num_workers=1):
        flag += 1
    assert data.flag.item() == 2


class Ring(list[Any]):
    """A type of the user's, collated as its user has it."""


class Rings(Sharing):
    def __getitem__(self, index: int) -> Any:
        return Ring([self.flag])


def test_what_a_users_way_to_collate_shares_is_shared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_collate_fn_map, Ring, _first)
    data = Rings()
    for flag in DataLoader(data, num_workers=1):
        flag += 1
    assert data.flag.item() == 2


def _first(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return batch[0][0]


class Episodes:
    """Each sample is made of what another loader gives."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> list[Any]:
        inner = DataLoader(TensorDataset(torch.arange(6), torch.arange(6)), 4)
        return [(x + index, y) for x, y in inner]


@pytest.mark.parametrize("kind", [DataLoader, TorchDataLoader])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_within_a_worker_gives_batches(kind: Any, workers: int) -> None:
    for index, episode in enumerate(kind(Episodes(), batch_size=None, num_workers=workers)):
        assert [x.tolist() for x, _ in episode] == [[index + i for i in range(4)], [index + 4, index + 5]]


def test_in_the_main_process_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "by_value", None)
    kept = torch.arange(3)
    (batch,) = DataLoader([0], batch_size=None, collate_fn=functools.partial(_same, kept))
    assert batch is kept


def _same(kept: torch.Tensor, sample: int) -> torch.Tensor:
    return kept
