"""Place host memory on the NUMA node of a device's PCI slot. Only a hint: if the system refuses, nothing changes."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from pathlib import Path

logger = logging.getLogger("checkflow")

# mbind(2) has no wrapper in libc; numbers from arch/*/entry/syscalls.
_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1  # MPOL_PREFERRED: on this node while it has room
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def node_of_pci(address: str, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The NUMA node of a PCI device such as "0000:3b:00.0"; None if the system does not say, as with a single node."""
    try:
        node = int((devices / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer_node(address: int, size_bytes: int, node: int) -> bool:
    """Place pages that are not allocated yet on this node; returns whether the system agrees."""
    number = _MBIND.get(platform.machine())
    if number is None or not hasattr(os, "sched_getaffinity"):  # not Linux
        return False
    words = node // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _WORD_BITS] = 1 << (node % _WORD_BITS)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(size_bytes), ctypes.c_int(_PREFERRED),
        mask, ctypes.c_ulong(words * _WORD_BITS + 1), ctypes.c_uint(0),
    )  # fmt: skip
    if failed:
        logger.debug("staging memory is not placed on NUMA node %d: %s", node, os.strerror(ctypes.get_errno()))
    return not failed
