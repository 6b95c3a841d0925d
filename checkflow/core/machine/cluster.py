"""Cluster: how the devices of several ranks are joined, within a node and between nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from checkflow.core.errors import CheckflowError
from checkflow.core.machine.device import find_device


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices. Bandwidths are one way, for one device, as large collectives reach them."""

    name: str
    ranks_per_node: int
    peer_bytes_per_second: float  # to the other devices of the node
    nic_bytes_per_second: float | None  # of a device's own network card; None: there is only one node
    peer_uses_link: bool  # whether bytes to other devices of the node cross the link to the host
    nic_uses_link: bool  # the same, of bytes to other nodes
    source: str  # where the numbers come from
    peer_latency_seconds: float = 3.4e-6
    nic_latency_seconds: float = 14e-6
    call_seconds: float = 8.4e-6  # what a collective takes at least


# Latencies: those by which NCCL itself chooses its algorithms (src/graph/tuning.cc, protocol Simple; its figures for
# NVLink, PCI and the network stand in NVIDIA/nccl issue 1334). A rank's network card and its device share a PCI
# Express switch, so GPUDirect RDMA leaves the device over the link that copies to the host take, too (DGX H100 user
# guide, "Network modules" and its block diagram; DGX A100 user guide likewise).
_DGX_H100 = Cluster(
    name="DGX H100",
    ranks_per_node=8,
    peer_bytes_per_second=360e9,
    nic_bytes_per_second=42.5e9,
    peer_uses_link=False,
    nic_uses_link=True,
    source=(
        "NVIDIA DGX H100 datasheet (NVLink 450 GB/s one way, eight ConnectX-7 of 400 Gb/s); NCCL reaches 360 GB/s "
        "within a node (NVIDIA/nccl-tests issue 326) and 340 GB/s over eight cards (NVIDIA/nccl issue 1218)"
    ),
)
CLUSTERS: Mapping[str, Cluster] = {
    "H100": _DGX_H100,
    "H200": replace(_DGX_H100, name="DGX H200", source=_DGX_H100.source.replace("DGX H100", "DGX H200")),
    **dict.fromkeys(
        ("A100 40GB", "A100 80GB"),
        Cluster(
            name="DGX A100",
            ranks_per_node=8,
            peer_bytes_per_second=208e9,
            nic_bytes_per_second=22.7e9,
            peer_uses_link=False,
            nic_uses_link=True,
            source=(
                "NVIDIA DGX A100 datasheet (NVLink 300 GB/s one way, eight ConnectX-6 of 200 Gb/s); NCCL reaches "
                "208 GB/s over NVLink (NVIDIA/nccl-tests issue 178) and 91 GB/s over four cards (issue 100)"
            ),
        ),
    ),
    "RTX 3090": Cluster(
        name="four on PCIe 4.0",
        ranks_per_node=4,
        peer_bytes_per_second=16e9,
        nic_bytes_per_second=None,
        peer_uses_link=True,  # GeForce cards have no peer-to-peer copies: bytes go through host memory
        nic_uses_link=True,
        source=(
            "PCIe 4.0 x16; NCCL reaches two thirds of what the link gives on four GeForce cards "
            "(35 GB/s on PCIe 5.0, NVIDIA/nccl issue 1639)"
        ),
        peer_latency_seconds=5.7e-6,
    ),
}


def cluster_of(device: str, ranks: int) -> Cluster:
    """Return the cluster that devices of this name, however it is written, usually stand in.

    Raises:
        CheckflowError: none is known, or it has no network for so many ranks.
    """
    with contextlib.suppress(CheckflowError):  # a probed device has its maker's name
        device = find_device(device).name
    found = CLUSTERS.get(device)
    if found is None:
        raise CheckflowError(f"no cluster is known for {device}; --ranks plans these devices: {', '.join(CLUSTERS)}")
    if found.nic_bytes_per_second is None and ranks > found.ranks_per_node:
        raise CheckflowError(
            f"{device} is planned in one node of {found.ranks_per_node}, without a network: not for {ranks} ranks"
        )
    return found
