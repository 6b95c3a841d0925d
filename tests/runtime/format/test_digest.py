"""Digests: device and host reckon the same number, and no small change of the bytes leaves it as it was."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkflow.core.state import StateTensor
from checkflow.runtime.format import digest
from checkflow.runtime.format.digest import BLOCK_ITEMS, Digests, digest_memory
from checkflow.runtime.format.layout import STORED_TYPES

BLOCK = 4 * BLOCK_ITEMS


def on_device(memory: torch.Tensor) -> digest.Digest:
    """As a device reckons it, on the CPU."""
    sums = digest.device_sums(memory, digest.weights_on(memory.device))
    joined = torch.cat(sums) if sums else torch.empty(0, dtype=torch.int64)
    return digest.Digest("sums", digest._combined(joined.numpy().view("u8"), memory.nbytes))


def on_host(content: bytes, rule: digest.Rule = "sums") -> digest.Digest:
    held = ctypes.create_string_buffer(content, len(content) or 1)
    return digest_memory(rule, ctypes.addressof(held), len(content))


def tensor_of(content: bytes, before: int = 0) -> torch.Tensor:
    """These bytes, at so many bytes from the begin of an aligned storage."""
    memory = torch.zeros(before + len(content), dtype=torch.uint8)
    memory[before:] = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else 0
    return memory[before:]


def random_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


SIZES = [*range(18), *(BLOCK + odd for odd in (-4, -1, 0, 1, 3, 4)), 33 * BLOCK + 7]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("before", [0, 1, 2, 4, 6])
def test_device_and_host_agree_at_every_size_and_alignment(size: int, before: int) -> None:
    content = random_bytes(size, size)
    assert on_device(tensor_of(content, before)) == on_host(content)


@pytest.mark.parametrize("dtype", list(STORED_TYPES))
def test_every_dtype_is_digested_by_its_bytes(dtype: str) -> None:
    content = random_bytes(16 * 21)
    tensor = tensor_of(content).view(getattr(torch, dtype))
    assert on_device(tensor) == on_host(content)
    if tensor.is_complex():
        assert on_device(tensor.conj()) == on_host(content)


def test_the_order_of_memory_counts_and_nothing_beyond_it() -> None:
    content = random_bytes(2 * 3 * 4 * 5 * 4)
    tensor = tensor_of(content).view(torch.float32).view(2, 4, 5, 3).permute(0, 3, 1, 2)
    assert on_device(tensor) == on_host(content)
    flat = tensor_of(random_bytes(64))
    assert on_device(flat[8:24]) == on_host(bytes(flat[8:24].tolist()))


def mix(value: int) -> int:
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD % 2**64
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53 % 2**64
    return value ^ value >> 33


@pytest.mark.parametrize("size", [0, 1, 4, 9, BLOCK + 5])
def test_it_is_what_its_definition_says(size: int) -> None:
    content = random_bytes(size)
    padded = content + bytes(-size % 4)
    items = [int.from_bytes(padded[at : at + 4], "little", signed=True) for at in range(0, len(padded), 4)]
    weights = digest._weights().tolist()
    value = mix(size)
    for number, first in enumerate(range(0, len(items), BLOCK_ITEMS), 1):
        block = items[first : first + BLOCK_ITEMS]
        total = sum(item * weight for item, weight in zip(block, weights, strict=False))
        value += mix((total + number * digest.GOLDEN) % 2**64)
    assert on_host(content).value == value % 2**64


@pytest.mark.parametrize("rule", ["sums", "xxh3"])
@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=1, max_size=70), st.data())
def test_a_flipped_bit_is_seen(rule: digest.Rule, content: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    assert on_host(bytes(changed), rule) != on_host(content, rule)


def test_every_flipped_bit_of_a_block_s_ends_is_seen() -> None:
    content = bytearray(random_bytes(2 * BLOCK + 6))
    before = on_host(bytes(content))
    for place in (0, 1, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 5):
        for bit in range(8):
            content[place] ^= 1 << bit
            assert on_host(bytes(content)) != before
            content[place] ^= 1 << bit


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(min_size=8, max_size=8), min_size=2, max_size=9, unique=True), st.data())
def test_exchanged_words_are_seen(words: list[bytes], data: st.DataObject) -> None:
    one, other = data.draw(st.permutations(range(len(words))))[:2]
    changed = list(words)
    changed[one], changed[other] = words[other], words[one]
    assert on_host(b"".join(changed)) != on_host(b"".join(words))


def test_exchanged_items_are_seen_wherever_they_lie() -> None:
    """Items that differ in their topmost bits alone: what a weak sum would not see."""
    weights = digest._weights()
    assert len(set((weights % 2**33).tolist())) == BLOCK_ITEMS
    assert all(weights % 2 == 1)
    rng = random.Random(3)
    for _ in range(30):
        one, other = rng.sample(range(3 * BLOCK_ITEMS), 2)
        content = bytearray(3 * BLOCK)
        content[4 * one + 3] = 0x80
        changed = bytearray(3 * BLOCK)
        changed[4 * other + 3] = 0x80
        assert on_host(bytes(content)) != on_host(bytes(changed))


def test_blocks_that_are_exchanged_are_seen_and_zeros_at_the_end_count() -> None:
    one, other = random_bytes(BLOCK, 1), random_bytes(BLOCK, 2)
    assert on_host(one + other) != on_host(other + one)
    assert len({on_host(bytes(size)).value for size in range(9)}) == 9


def test_all_tensors_at_once() -> None:
    state = [StateTensor(f"model/{size}", "parameter", tensor_of(random_bytes(size))) for size in (0, 3, BLOCK + 5)]
    known = Digests(state).take()
    assert known == {item.name: on_host(bytes(item.tensor.tolist()), "xxh3") for item in state}


def test_all_tensors_at_once_as_a_device_reckons_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "in_host_memory", lambda tensor: len(tensor) == 4)
    sizes = (0, 3, 4, BLOCK, 33 * BLOCK + 7, 1)
    state = [StateTensor(f"model/{size}", "parameter", tensor_of(random_bytes(size), 2)) for size in sizes]
    digests = Digests(state)
    state[1].tensor.fill_(0)  # what is written later does not count
    expected = {f"model/{n}": on_host(random_bytes(n), "xxh3" if n == 4 else "sums") for n in sizes}
    assert digests.wait() == expected
    assert digests.take() == expected


@pytest.mark.cuda
def test_on_a_gpu_it_is_the_same_number() -> None:
    sizes = (0, 3, 4, BLOCK, 33 * BLOCK + 7)
    contents = {f"model/{size}": random_bytes(size) for size in sizes}
    state = [StateTensor(name, "parameter", tensor_of(content, 8).cuda()) for name, content in contents.items()]
    assert Digests(state).wait() == {name: on_host(content) for name, content in contents.items()}
