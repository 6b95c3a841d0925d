"""Device: what a GPU and its link can do.

Numbers are the makers' own; efficiency factors turn them into what training sees.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from checkflow.core.errors import CheckflowError, first_fault
from checkflow.core.graph import STRICT, Named
from checkflow.core.small_files import read_regular

DeviceKind = Literal["cuda", "cpu"]
ComputeCapability = tuple[int, int]  # of an NVIDIA GPU, major and minor
_MOST_FILE_BYTES = 1 << 16
_MOST = 1e18  # of bytes, bytes per second, or operations per second: an exabyte; no device comes near
_LEAST_SHARE = 1e-6  # of a peak that anything reaches; times the least peak it still is a number to divide by
RESERVED_SHARE = 0.05  # of a device's memory: what its driver and its allocator's gaps take


def usable_bytes(memory_bytes: int) -> int:
    """What a job may use of a device's memory, unless the user says otherwise."""
    return int(memory_bytes * (1 - RESERVED_SHARE))


@dataclass(frozen=True)
class Device:
    """A device to plan for.

    Raises:
        CheckflowError: a number is not positive (``copy_seconds``: negative) or beyond all measure, a rate is below 1,
            an efficiency below a millionth or above 1, or the float32 peak is missing.

    A device file (``checkflow probe -o``, :func:`read_device`) is a JSON object with these fields.
    """

    __pydantic_config__ = STRICT
    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_second: float
    link_bandwidth_bytes_per_second: (
        float  # device to host, one way, as measured on such links (not the headline number)
    )
    plain_flops_per_second: Named[str, float]  # by dtype, general units
    matrix_flops_per_second: Named[str, float]  # by dtype, matrix units ("tensor cores"), dense
    compute_efficiency: float  # share of the peak that large matrix products and convolutions reach
    memory_efficiency: float  # share of the peak that element-wise operators reach
    launch_seconds: float  # the least time between two operators
    source: str  # where the numbers come from
    matrix_efficiency: float | None = None  # the same for matrix units, which are harder to keep busy; None: equal
    kind: DeviceKind = "cuda"  # what torch chooses its optimizers' implementations for
    # What a probe measures besides (None: not known). The link above is from the device to pinned host memory; where
    # the device's memory is the host's (a CPU), it is one thread's copy, and the three others have no meaning.
    link_to_device_bytes_per_second: float | None = None  # from pinned host memory
    pageable_to_host_bytes_per_second: float | None = None
    pageable_to_device_bytes_per_second: float | None = None
    disk_write_bytes_per_second: float | None = None  # one file, its fsync included
    disk_read_bytes_per_second: float | None = None  # of what is not in memory
    copy_seconds: float = 0.0  # what each piece of state costs the link besides its bytes; 0: not measured
    compute_capability: ComputeCapability | None = None  # by which torch chooses kernels; None: not known, or no GPU

    def __post_init__(self) -> None:
        numbers: dict[str, float] = {
            field.name: value for field in fields(self) if isinstance(value := getattr(self, field.name), int | float)
        }
        for units in ("plain_flops_per_second", "matrix_flops_per_second"):
            numbers |= {f"{units}.{dtype}": peak for dtype, peak in getattr(self, units).items()}
        if "float32" not in self.plain_flops_per_second:
            raise CheckflowError(
                f'device {self.name}: plain_flops_per_second has no "float32", by which every dtype without a figure of'
                " its own is judged: add the float32 peak of the general units"
            )
        for name, number in numbers.items():
            if name == "copy_seconds" and not 0 <= number < math.inf:
                raise CheckflowError(f"device {self.name}: {name} must be a number, at least zero, not {number}")
            if name != "copy_seconds" and not 0 < number < math.inf:
                raise CheckflowError(f"device {self.name}: {name} must be a number above zero")
            if number >= _MOST:
                raise CheckflowError(
                    f"device {self.name}: {name} is more than any device has, which is below {_MOST:g}"
                )
            if "_per_second" in name and number < 1:
                raise CheckflowError(f"device {self.name}: {name} must be at least 1, not {number}")
            if name.endswith("efficiency") and not _LEAST_SHARE <= number <= 1:
                raise CheckflowError(
                    f"device {self.name}: {name} is a share of the peak, from {_LEAST_SHARE:g} to 1, not {number}"
                )


# Efficiencies. The paper gives none, so they are fitted to public training throughputs:
# docs/development/throughputs.md lists these, six and more a card,
# with their sources and the predictions, all within a factor of 1.5. Each card has two:
# for its general units, by products and convolutions in float32 (V100: BERT and VGG-16), and for its matrix units, by
# transformers and ResNets in TF32 and halves. Where no one factor fits, it is the larger one, which makes iterations
# short and leaves the link less time: plans err to the safe side. General units of the A100, H100 and H200: as the
# V100's, since nobody publishes float32 without TF32 for them.
_GENERAL = 0.85
# Memory: plain copies stream at 85 to 92 % of the peak (BabelStream's results for these cards), kernels with several
# inputs at less: 0.8. Where the same cores have faster memory they use less of it: from the A100 with 40 GB to that
# with 80, and from the H100 to the H200, ResNet-50 gains 9 to 19 % by 31 and 43 % of bandwidth (Lambda's figures).
_STREAMING = 0.8
# Kernels that are launched back to back follow each other within 2 to 4 µs where the host keeps up (NVIDIA, "Getting
# started with CUDA graphs", 2019, measured 3.8 µs for kernels of 2.9 µs); eager PyTorch's own calls keep it near 4.
_LAUNCH_SECONDS = 4e-6
# What the direction from device to host gives to large pinned copies, by bandwidthTest and nvbandwidth of NVIDIA, where
# one PCI Express x16 is made for 15.75, 31.5 and 63 GB/s: some 80 % of that up to generation 4 (A100: 25.1 GB/s,
# NVIDIA/nvbandwidth issue 42), 84 % in generation 5 (H100: 52.8 GB/s on each of eight, issue 24).
_PCIE3, _PCIE4, _PCIE5 = 12.5e9, 25e9, 52.8e9
_T = 1e12  # the makers' tables count in teraflops
# Compute capabilities are those of NVIDIA's table "CUDA GPU Compute Capability" (developer.nvidia.com/cuda-gpus, and
# its page of legacy GPUs).

_GTX_1080_TI = Device(
    name="GTX 1080 Ti",
    memory_bytes=11 * 2**30,
    memory_bandwidth_bytes_per_second=484e9,
    link_bandwidth_bytes_per_second=_PCIE3,
    plain_flops_per_second={"float32": 11.34 * _T, "float64": 0.354 * _T},  # halves are computed in float32
    matrix_flops_per_second={},
    compute_efficiency=0.70,
    memory_efficiency=_STREAMING,
    launch_seconds=_LAUNCH_SECONDS,
    source="NVIDIA GeForce GTX 1080 Ti specifications (3,584 cores at 1,582 MHz, 11 GB of GDDR5X); PCIe 3.0 x16",
    compute_capability=(6, 1),
)
_V100 = Device(
    name="V100",
    memory_bytes=16 * 2**30,
    memory_bandwidth_bytes_per_second=900e9,
    link_bandwidth_bytes_per_second=_PCIE3,
    plain_flops_per_second={"float32": 15.7 * _T, "float64": 7.8 * _T, "float16": 31.4 * _T},
    matrix_flops_per_second={"float16": 125 * _T},
    compute_efficiency=_GENERAL,
    memory_efficiency=_STREAMING,
    launch_seconds=_LAUNCH_SECONDS,
    source="NVIDIA V100 Tensor Core GPU datasheet (SXM2, 16 GB); PCIe 3.0 x16",
    matrix_efficiency=0.60,
    compute_capability=(7, 0),
)
_RTX_3090 = Device(
    name="RTX 3090",
    memory_bytes=24 * 2**30,
    memory_bandwidth_bytes_per_second=936e9,
    link_bandwidth_bytes_per_second=_PCIE4,
    plain_flops_per_second={
        "float32": 35.6 * _T,
        "float64": 0.556 * _T,
        "float16": 35.6 * _T,
        "bfloat16": 35.6 * _T,
    },
    matrix_flops_per_second={"tf32": 35.6 * _T, "float16": 71 * _T, "bfloat16": 71 * _T},
    compute_efficiency=0.75,
    memory_efficiency=_STREAMING,
    launch_seconds=_LAUNCH_SECONDS,
    source="NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A (dense, accumulating in FP32); PCIe 4.0 x16",
    matrix_efficiency=0.80,
    compute_capability=(8, 6),
)
_A100_40 = Device(
    name="A100 40GB",
    memory_bytes=40 * 2**30,
    memory_bandwidth_bytes_per_second=1555e9,
    link_bandwidth_bytes_per_second=_PCIE4,
    plain_flops_per_second={"float32": 19.5 * _T, "float64": 9.7 * _T, "float16": 78 * _T, "bfloat16": 39 * _T},
    matrix_flops_per_second={
        "tf32": 156 * _T,
        "float16": 312 * _T,
        "bfloat16": 312 * _T,
        "float64": 19.5 * _T,
    },
    compute_efficiency=_GENERAL,
    memory_efficiency=_STREAMING,
    launch_seconds=_LAUNCH_SECONDS,
    source="NVIDIA A100 Tensor Core GPU datasheet and architecture whitepaper (SXM4, 40 GB, dense); PCIe 4.0 x16",
    matrix_efficiency=0.65,
    compute_capability=(8, 0),
)
_H100 = Device(
    name="H100",
    memory_bytes=80 * 2**30,
    memory_bandwidth_bytes_per_second=3350e9,
    link_bandwidth_bytes_per_second=_PCIE5,
    plain_flops_per_second={
        "float32": 66.9 * _T,
        "float64": 33.5 * _T,
        "float16": 133.8 * _T,
        "bfloat16": 133.8 * _T,
    },
    matrix_flops_per_second={
        "tf32": 494.7 * _T,
        "float16": 989.4 * _T,
        "bfloat16": 989.4 * _T,
        "float64": 66.9 * _T,
    },
    compute_efficiency=_GENERAL,
    memory_efficiency=0.75,
    launch_seconds=_LAUNCH_SECONDS,
    source="NVIDIA H100 Tensor Core GPU datasheet and architecture whitepaper (SXM5, 80 GB, dense); PCIe 5.0 x16",
    matrix_efficiency=0.55,
    compute_capability=(9, 0),
)
# A small cloud machine, such as CI gives: two cores of a server and one of its memory channels. Each core does 64
# float32 operations a cycle (two AVX-512 units) at 2.3 GHz; the channel is DDR4-3200. "Device to host" is one thread
# that copies memory: it reads and writes each byte, and half of the channel is left to training. Efficiencies: small
# convolutions reach half of the peak in oneDNN, and eager PyTorch needs some 5 µs an operator.
_CHANNEL = 25.6e9
_CPU = Device(
    name="cpu",
    memory_bytes=16 * 2**30,
    memory_bandwidth_bytes_per_second=_CHANNEL,
    link_bandwidth_bytes_per_second=_CHANNEL / 4,
    plain_flops_per_second={"float32": 2 * 64 * 2.3e9, "float64": 2 * 32 * 2.3e9},
    matrix_flops_per_second={},
    compute_efficiency=0.5,
    memory_efficiency=_STREAMING,
    launch_seconds=5e-6,
    source="Intel Xeon Platinum 8380 product specifications (two of its 40 cores, one of its 8 channels, 16 GB)",
    kind="cpu",
)

CATALOGUE: Mapping[str, Device] = {
    device.name: device
    for device in (
        _GTX_1080_TI,
        _V100,
        replace(_V100, name="V100 32GB", memory_bytes=32 * 2**30, source=_V100.source.replace("16 GB", "32 GB")),
        _RTX_3090,
        _A100_40,
        replace(
            _A100_40,
            name="A100 80GB",
            memory_bytes=80 * 2**30,
            memory_bandwidth_bytes_per_second=2039e9,
            memory_efficiency=0.75,
            source=_A100_40.source.replace("40 GB", "80 GB"),
        ),
        _H100,
        replace(
            _H100,
            name="H200",
            memory_bytes=141 * 10**9,
            memory_bandwidth_bytes_per_second=4800e9,
            memory_efficiency=0.62,
            source="NVIDIA H200 Tensor Core GPU datasheet (SXM, 141 GB; units as the H100's, dense); PCIe 5.0 x16",
        ),
        _CPU,
    )
}
_DECORATION = re.compile(r"nvidia|geforce|tesla|sxm\d?|hbm\d?e?|[^a-z0-9]")
_ALSO = {"1080ti": "gtx1080ti", "3090": "rtx3090", "v10016": "v100", "h10080": "h100", "h200141": "h200"}


def find_device(name: str) -> Device:
    """The catalogue's device of this name, however it is written: "rtx3090", "RTX 3090", "NVIDIA GeForce RTX 3090".

    Raises:
        CheckflowError: no such device; the message lists those there are.
    """

    def plain(text: str) -> str:
        short = _DECORATION.sub("", text.lower()).removesuffix("gb")
        return _ALSO.get(short, short)

    for device in CATALOGUE.values():
        if plain(device.name) == plain(name):
            return device
    raise CheckflowError(f"unknown device {name!r}; the known ones are: {', '.join(CATALOGUE)}")


def read_device(path: str | os.PathLike[str]) -> Device:
    """A device from a JSON file with the fields of :class:`Device`.

    Raises:
        CheckflowError: the file cannot be read, or is no device; one line with the reason.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        data = read_regular(path, _MOST_FILE_BYTES)
    except OSError as error:
        raise CheckflowError(f"cannot read the device {path}: {error.strerror or error}") from error
    try:
        device: Device = TypeAdapter(Device).validate_json(data)
    except ValidationError as error:
        raise CheckflowError(f"{path}: not a device: {first_fault(error)}") from None
    except CheckflowError as error:
        raise CheckflowError(f"{path}: {error}") from None
    return device


def write_device(device: Device, path: str | os.PathLike[str]) -> None:
    """A device file, written whole or not at all.

    Raises:
        CheckflowError: the file cannot be written; one line with the reason.
    """
    from pydantic import TypeAdapter

    target = check_writable(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(TypeAdapter(Device).dump_json(device, indent=2) + b"\n")
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):  # the first error is the one to report
            temporary.unlink(missing_ok=True)
        raise CheckflowError(f"cannot write the device to {target}: {error.strerror or error}") from error


def check_writable(path: str | os.PathLike[str]) -> Path:
    """The path, which names a file in a folder that exists.

    Raises:
        CheckflowError: it does not; one line.
    """
    target = Path(path)
    if not target.name or target.is_dir():
        raise CheckflowError(f"cannot write the device to {str(path)!r}: that names no file")
    if not target.parent.is_dir():
        raise CheckflowError(f"cannot write the device to {target}: there is no folder {target.parent}")
    return target
