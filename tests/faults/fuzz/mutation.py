"""Changes to files that keep enough of their structure to get past the first check: JSON trees, msgpack trees, bytes.

All that is drawn comes from the ``random.Random`` that is passed in: the same one gives the same bytes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack

_HUGE_DEPTH = 100_000
_MOST_GROWTH_BYTES = 400_000  # of an input: larger ones take long and tell nothing more


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes that go into a JSON text as they are: what no serializer would write."""

    text: bytes


class Pairs(list[Any]):
    """A JSON object as [key, value] lists, so that a key may occur twice."""


def _parse_number(text: str) -> Raw:
    return Raw(text.encode())


def parse(text: bytes) -> Any:
    """JSON as a tree that can be changed; floats stay as they were spelled."""
    return json.loads(
        text, object_pairs_hook=lambda pairs: Pairs([key, value] for key, value in pairs), parse_float=_parse_number
    )


def dump(node: Any) -> bytes:
    """The text of a tree, as compact as the project writes it."""
    if isinstance(node, Raw):
        return node.text
    if isinstance(node, Pairs):
        return b"{" + b",".join(dump(key) + b":" + dump(value) for key, value in node) + b"}"
    if isinstance(node, dict):
        return b"{" + b",".join(dump(key) + b":" + dump(value) for key, value in node.items()) + b"}"
    if isinstance(node, list | tuple):
        return b"[" + b",".join(map(dump, node)) + b"]"
    return json.dumps(node).encode()


_NUMBERS: tuple[Any, ...] = (
    -1, 0, 1, 2, 3, 65, 2**31, 2**32, 2**53, 2**62, 2**62 + 1, 2**63 - 1, 2**63, 2**64, 10**18, 10**18 + 1, 10**30,
    -(2**63), 1.0, 1.5, -0.5, 1e308, 5e-324, Raw(b"NaN"), Raw(b"Infinity"), Raw(b"-Infinity"), Raw(b"1e999"),
    Raw(b"-0"), Raw(b"01"), Raw(b"9" * 5000), Raw(b"0." + b"1" * 5000), Raw(b"1" + b"0" * 4000),
)  # fmt: skip
_TEXTS: tuple[Any, ...] = (
    "", ".", "..", "../x", "/etc/passwd", "a/b", "a\0b", "\n", "x" * 249, "x" * 251, "x" * 60_000, "é\u2028", "😀",
    Raw(b'"\\ud800"'), Raw(b'"\xff\xfe"'), Raw(b'"\xed\xa0\x80"'), Raw(b'"\x01"'), Raw(b"'x'"), Raw(b'"\\u00"'),
    "__metadata__", "manifest.json", "state.msgpack", "step-00000001", "float32", "float4_e2m1fn_x2", "complex128",
    "F4", "C64", "BOOL", "0000000000000000", "1", "true",
)  # fmt: skip
_OTHERS: tuple[Any, ...] = (
    None, True, False, [], Pairs(), [[]], [None], Pairs([["a", 1], ["a", 2]]), Raw(b""), Raw(b"]"), Raw(b","),
    Raw(b"[" * _HUGE_DEPTH), Raw(b"[" * _HUGE_DEPTH + b"]" * _HUGE_DEPTH), Raw(b"[" * 150 + b"]" * 150),
    Raw(b'{"a":' * 20_000 + b"1" + b"}" * 20_000), Raw(b"[" + b"1," * 50_000 + b"1]"), Raw(b"\xef\xbb\xbf1"),
)  # fmt: skip


def nasty(rng: random.Random) -> Any:
    return _copied(rng.choice(rng.choice((_NUMBERS, _TEXTS, _OTHERS))))


def _slots(root: list[Any]) -> list[tuple[list[Any], int]]:
    """Every place of a tree that may hold another node: (list, index)."""
    found: list[tuple[list[Any], int]] = []
    waiting: list[list[Any]] = [root]
    while waiting:
        node = waiting.pop()
        for index, child in enumerate(node):
            found.append((node, index))
            if isinstance(child, list):
                waiting.append(child)
    return found


def change_json(rng: random.Random, tree: Any, donor: Any) -> Any:
    """The tree with one to three changes; parts of the donor may be grafted in. Neither is changed itself."""
    root = [_copied(tree)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = _slots(root)
        node, index = rng.choice(places)
        if isinstance(node, Pairs):  # the pair, rather than one of its two halves
            _change_member(rng, node, index)
        else:
            node[index] = _changed(rng, node[index], places, donor)
    return root[0]


def graft_json(rng: random.Random, tree: Any, value: Any) -> Any:
    """The tree with ``value`` at one place."""
    root = [_copied(tree)]
    node, index = rng.choice([place for place in _slots(root) if not isinstance(place[0], Pairs)])
    node[index] = value
    return root[0]


def _copied(node: Any) -> Any:
    return type(node)(map(_copied, node)) if isinstance(node, list) else node


def _change_member(rng: random.Random, node: Pairs, index: int) -> None:
    kind = rng.randrange(4)
    if kind == 0:
        del node[index]
    elif kind == 1:  # the same key twice
        node.insert(rng.randrange(len(node) + 1), [node[index][0], rng.choice((node[index][1], nasty(rng)))])
    elif kind == 2:
        node.append([rng.choice(("further", *_TEXTS)), rng.choice((node[index][1], nasty(rng)))])
    else:
        other = rng.randrange(len(node))
        node[index], node[other] = node[other], node[index]


def _changed(rng: random.Random, value: Any, places: list[tuple[list[Any], int]], donor: Any) -> Any:
    kind = rng.randrange(8)
    if kind == 0:  # another part of the same file
        node, index = rng.choice(places)
        return _copied(node[index])
    if kind == 1:  # a part of another one
        node, index = rng.choice(_slots([donor]))
        return _copied(node[index])
    if kind == 2 and isinstance(value, list) and value:
        return _changed_list(rng, value)
    if isinstance(value, bool) or value is None:
        return nasty(rng)
    if kind < 6 and isinstance(value, int):
        return rng.choice((value + 1, value - 1, -value, value * 2, value * 8, value + 2**62, float(value), str(value)))
    if kind < 6 and isinstance(value, str):
        return changed_text(rng, value)
    return nasty(rng)


def _changed_list(rng: random.Random, value: list[Any]) -> list[Any]:
    copy = type(value)(value)
    index = rng.randrange(len(copy))
    kind = rng.randrange(4)
    if kind == 0:
        del copy[index]
    elif kind == 1:
        copy.insert(rng.randrange(len(copy) + 1), _copied(copy[index]))
    elif kind == 2:
        rng.shuffle(copy)
    else:
        copy *= rng.choice((0, 2, 100))
    return copy


def changed_text(rng: random.Random, value: str) -> str:
    position = rng.randrange(len(value) + 1)
    added = rng.choice(("", "x", "/", "\0", ".", "0", "é", "\x7f", " ", "x" * 250))
    return value[:position] + added + value[position + rng.randrange(2) :]


def change_bytes(rng: random.Random, data: bytes, donor: bytes) -> bytes:
    """Flips, cuts, repeats, length fields and pieces of another file, one to eight of them."""
    copy = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        position = rng.randrange(len(copy) + 1)
        kind = rng.randrange(9)
        if kind == 0 and copy:
            copy[position % len(copy)] ^= 1 << rng.randrange(8)
        elif kind == 1 and copy:
            copy[position % len(copy)] = rng.choice((0, 1, 0x7F, 0x80, 0xC1, 0xC9, 0xFF, rng.randrange(256)))
        elif kind == 2:
            del copy[position:]
        elif kind == 3:
            del copy[position : position + rng.choice((1, 2, 8, 64, 4096))]
        elif kind == 4:
            copy[position:position] = rng.randbytes(rng.choice((1, 2, 8, 64)))
        elif kind == 5:  # a length field, of either byte order
            width = rng.choice((1, 2, 4, 8))
            number = rng.choice((0, 1, 2**7, 2**15 - 1, 2**31 - 1, 2**31, 2**62, 2**63 - 1, 2**64 - 1, len(copy)))
            field = (number % 2 ** (8 * width)).to_bytes(width, rng.choice(("little", "big")))
            copy[position : position + width] = field
        elif kind == 6 and donor:
            begin = rng.randrange(len(donor))
            copy[position:position] = donor[begin : begin + rng.choice((4, 32, 256, 4096))]
        elif kind == 7 and copy:
            begin = rng.randrange(len(copy))
            copy[position:position] = copy[begin : begin + rng.choice((1, 16, 256))] * rng.choice((1, 2, 50))
        else:
            copy[position:position] = rng.choice((b"[", b"{", b"\x81", b"\x91", b"\xc7", b"[[" * 300, b"\x91" * 300))
    return bytes(copy[:_MOST_GROWTH_BYTES])


# msgpack: the extra state, whose extension values hold msgpack themselves


@dataclass(slots=True)
class Ext:
    """An extension value, its content as a tree (in a list of one) where it is msgpack, else as it is."""

    code: int
    content: list[Any]


def unpack(data: bytes) -> Any:
    """The tree of packed data; whatever of an extension's content is no msgpack stays as it is."""

    def extension(code: int, content: bytes) -> Any:
        try:
            inner = unpack(content)
            return Ext(code, [inner if pack(inner) == content else Raw(content)])
        except (ValueError, TypeError):
            return Ext(code, [Raw(content)])

    return msgpack.unpackb(
        data, ext_hook=extension, strict_map_key=False, unicode_errors="surrogatepass", object_pairs_hook=_members
    )


def _members(pairs: list[Any]) -> Pairs:
    return Pairs([key, value] for key, value in pairs)


def pack(node: Any) -> bytes:
    """The bytes of a tree."""
    if isinstance(node, Ext):
        return bytes(msgpack.packb(msgpack.ExtType(node.code, pack(node.content[0]))))
    packer = msgpack.Packer(unicode_errors="surrogatepass")
    if isinstance(node, Pairs):
        head = packer.pack_map_header(len(node))
        return bytes(head) + b"".join(pack(key) + pack(value) for key, value in node)
    if isinstance(node, list):
        return bytes(packer.pack_array_header(len(node))) + b"".join(map(pack, node))
    if isinstance(node, Raw):
        return node.text
    if type(node) is int:  # what JSON may say, and msgpack cannot
        node = max(-(2**63), min(2**64 - 1, node))
    return bytes(packer.pack(node))


_PACKED: tuple[Callable[[random.Random], Any], ...] = (
    lambda rng: rng.choice((0, 1, -1, 2**31, 2**40, 2**63 - 1, 2**64 - 1, -(2**63), 10**10)),
    lambda rng: rng.choice((0.0, -0.0, float("nan"), float("inf"), 1e308)),
    lambda rng: rng.choice(("", "cpu", "cuda:0", "meta", "float32", "<U0", "<U1", "|S0", "<f8", "<M8[25s]", "|V0")),
    lambda rng: rng.choice(("list", "int", "\ud800", "a\0b", "x" * 70_000, "float4_e2m1fn_x2", "<f16", ">c16")),
    lambda rng: rng.choice((b"", b"\0" * 8, b"x" * 10, rng.randbytes(16), b"y" * 70_000)),
    lambda rng: rng.choice((None, True, False, [], [None], [0, 0, 0], [2**62, 0], [2**33], Pairs(), [-1])),
    lambda rng: Ext(
        rng.choice(CODES),
        [rng.choice(([], 0, 2**40, "x", b"", [None], [0, 0], ["<U0", [2**40], b""], ["|S0", [2**28], b""]))],
    ),
    lambda rng: Ext(rng.choice((*range(128), *range(128 - 8, 128))), [Raw(rng.randbytes(rng.choice((0, 1, 4, 12))))]),
    lambda rng: _nested(rng.choice(CODES), rng.choice((3, 30, 62, 63, 64, 65, 66, 200))),
    lambda rng: Raw(b"\x91" * rng.choice((60, 500, 600, 100_000)) + b"\xc0"),
    lambda rng: Raw(rng.choice((b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xc1"))),
)
CODES = (*range(1, 9), *range(16, 22), *range(32, 37), 48, 49, *range(64, 69))


def _nested(code: int, depth: int) -> Any:
    """Bytes, not a tree: it may be deeper than Python counts."""
    text = pack(Ext(code, [[]]))
    for _ in range(depth):
        text = bytes(msgpack.packb(msgpack.ExtType(code, b"\x91" + text)))
    return Raw(text)


def change_packed(rng: random.Random, tree: Any, donor: Any) -> Any:
    """The tree with one to three changes, some of them inside of extension values."""
    root = [_copied_packed(tree)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = _packed_slots(root)
        node, index = rng.choice(places)
        value = node[index]
        kind = rng.randrange(8)
        if isinstance(node, Pairs):
            _change_member(rng, node, index) if rng.randrange(3) else node.append(["k", rng.choice(_PACKED)(rng)])
        elif kind == 0:
            other, at = rng.choice(places)
            node[index] = _copied_packed(other[at])
        elif kind == 1:
            other, at = rng.choice(_packed_slots([donor]))
            node[index] = _copied_packed(other[at])
        elif kind < 4 and isinstance(value, Ext):
            value.code = rng.choice(CODES)
        elif kind < 4 and type(value) is list and value:
            node[index] = _changed_list(rng, value)
        elif kind < 4 and type(value) is int:
            node[index] = rng.choice((value + 1, -value, value * 2, value + 2**40))
        elif kind < 4 and type(value) is str:
            node[index] = changed_text(rng, value)
        elif kind < 4 and type(value) is bytes:
            node[index] = change_bytes(rng, value, b"")
        elif kind < 4 and isinstance(value, Raw):
            node[index] = Raw(change_bytes(rng, value.text, b""))
        else:
            node[index] = rng.choice(_PACKED)(rng)
    return root[0]


def _copied_packed(node: Any) -> Any:
    if isinstance(node, Ext):
        return Ext(node.code, [_copied_packed(node.content[0])])
    return type(node)(map(_copied_packed, node)) if isinstance(node, list) else node


def _packed_slots(root: list[Any]) -> list[tuple[list[Any], int]]:
    found: list[tuple[list[Any], int]] = []
    waiting: list[list[Any]] = [root]
    while waiting:
        node = waiting.pop()
        for index, child in enumerate(node):
            found.append((node, index))
            if isinstance(child, Ext):
                waiting.append(child.content)
            elif isinstance(child, list):
                waiting.append(child)
    return found
