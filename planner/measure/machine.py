"""The machine that this process runs on: the device that training would use here, and how much memory it has."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from checkflow.core.device import ComputeCapability, DeviceKind
from checkflow.core.host_memory import free_host_memory_bytes, host_memory_bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """Where training would run."""

    device: torch.device
    kind: DeviceKind
    name: str  # "NVIDIA H200", or the processor and its threads
    software: str  # torch and, on a GPU, CUDA and the driver
    memory_bytes: int  # all of the device's
    compute_capability: ComputeCapability | None = None  # of a GPU


def this_machine() -> Machine:
    """The current CUDA device where there is one that torch can use, else the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(device)
        software = f"torch {torch.__version__}, CUDA {torch.version.cuda}{_driver()}"
        capability = (properties.major, properties.minor)
        return Machine(device, "cuda", properties.name, software, properties.total_memory, capability)
    threads = torch.get_num_threads()
    name = f"{_processor()}, {threads} thread{'' if threads == 1 else 's'}"
    return Machine(torch.device("cpu"), "cpu", name, f"torch {torch.__version__}", host_memory_bytes())


def free_memory_bytes(device: torch.device) -> int:
    """What this process can still allocate on a device: of the host, without swapping."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for this process
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return free_host_memory_bytes()


def _processor() -> str:
    """The processor's name: Linux tells it in /proc alone."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "CPU"


def _driver() -> str:
    """ ", driver 550.54.15" on Linux; torch does not tell it."""
    version = Path("/proc/driver/nvidia/version")
    if not version.is_file():
        return ""
    words = version.read_text().partition("\n")[0].split()
    return next((f", driver {word}" for word in words if word[0].isdigit()), "")
