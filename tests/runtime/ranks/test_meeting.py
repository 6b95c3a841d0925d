"""Who a process is, and the place that torch's store is."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from checkflow.core.errors import MissingShardsError, StorageError
from checkflow.runtime.ranks import joining
from checkflow.runtime.ranks.identity import Identity, find_identity, launch_of
from checkflow.runtime.ranks.joining import agree_generation, join
from checkflow.runtime.ranks.torch_meeting import TorchMeeting, store_address
from tests.support.shard_tools import together
from tests.support.waiting import wait_for


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def test_values_are_seen_by_the_same_generation_alone(store: TCPStore) -> None:
    one, two, other = (TorchMeeting("localhost", store.port, name, 10) for name in ("g.0", "g.0", "g.1"))
    one.put("card/1", b"\x00\xff")
    one.put("receipt/1/1", b"r")
    assert two.get(["card/1", "card/2", "receipt/1/1"]) == {"card/1": b"\x00\xff", "receipt/1/1": b"r"}
    assert other.get(["card/1"]) == {}
    one.put("card/1", b"new")
    one.drop(["receipt/1/1", "receipt/9/9"])
    assert two.get(["card/1", "receipt/1/1"]) == {"card/1": b"new"}
    assert two.get([]) == {}


def test_a_store_that_is_not_there_is_named() -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port = store.port
    place = TorchMeeting("localhost", port, "g.0", 1)
    del store
    with pytest.raises(StorageError, match=f"the store at localhost:{port} does not answer"):
        for _ in range(100):
            place.put("a", b"")
    place.close()
    with pytest.raises(StorageError, match="is closed"):
        place.get(["a"])


def test_a_generation_is_agreed_whatever_earlier_starts_have_left(store: TCPStore) -> None:
    names = []
    for _ in range(3):  # at the same place
        places = [TorchMeeting("localhost", store.port, "starts", 10) for _ in range(3)]
        agreed = together(3, lambda rank, places=places: agree_generation(places[rank], rank, 3, 30))
        assert len(set(agreed)) == 1
        names += agreed[:1]
    assert len(set(names)) == 3


def test_ranks_that_do_not_come_to_agree_are_named(store: TCPStore) -> None:
    place = TorchMeeting("localhost", store.port, "starts", 10)
    with pytest.raises(MissingShardsError, match="rank 0 of 3 did not come"):
        agree_generation(place, 2, 3, 0.05)
    with pytest.raises(MissingShardsError, match="ranks 1 and 2 of 3 did not come") as error:
        agree_generation(place, 0, 3, 0.05)
    assert error.value.ranks == (1, 2)


def test_ranks_without_a_store_join_by_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_counted", itertools.repeat(0))  # each thread stands for a process
    directory = tmp_path / "checkpoints"
    councils = together(2, lambda rank: join(Identity(rank, 2, rank, "", ""), directory, start_seconds=30))
    try:
        assert councils[0].generation == councils[1].generation
        meetings = [directory / f".council-{councils[0].generation}"]  # that on the generation is over
        wait_for(lambda: list(directory.iterdir()) == meetings)
    finally:
        for council in reversed(councils):
            council.close()
            wait_for(lambda council=council: not council.running)
    assert not list(directory.iterdir())


def test_a_process_alone_has_no_identity() -> None:
    assert find_identity({}) is None
    assert find_identity({"TORCHELASTIC_RUN_ID": "run", "WORLD_SIZE": "1"}) is None


def test_identity_under_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    found = find_identity({"LOCAL_RANK": "1", "GROUP_RANK": "2", "TORCHELASTIC_RUN_ID": "a b/c"})
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.node) == (5, 8, 1, "2")
    assert found.launch == "a-b-c.0"


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, ""),
        ({"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": "3"}, "run.3"),
        ({"TORCHELASTIC_RUN_ID": "x" * 100}, "x" * 60 + ".0"),
    ],
)
def test_the_start_that_torchrun_counts(environment: dict[str, str], launch: str) -> None:
    assert launch_of(environment) == launch


def test_the_address_of_the_store() -> None:
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "node1", "MASTER_PORT": "123"}
    assert store_address(agent) == ("node1", 123)
    assert store_address({}) is None
