"""The machine that this process runs on: the device that training would use, and its memory."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from checkflow.core.machine.device import ComputeCapability, DeviceKind
from checkflow.core.machine.host_memory import free_host_memory_bytes, host_memory_bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """Where training would run."""

    device: torch.device
    kind: DeviceKind
    name: str  # "NVIDIA H200", or the processor and its threads
    software: str  # torch and, on a GPU, CUDA and the driver
    memory_bytes: int  # total
    compute_capability: ComputeCapability | None = None  # of a GPU


def this_machine() -> Machine:
    """Return the current CUDA device if torch can use one, else the CPU."""
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
    """Return what this process can still allocate on a device; on the host, without swapping."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # cached by torch
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return free_host_memory_bytes()


def _processor() -> str:
    """Return the processor's name, which Linux has in /proc only."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "CPU"


def _driver() -> str:
    """Return ", driver 550.54.15" on Linux; torch does not know it."""
    version = Path("/proc/driver/nvidia/version")
    if not version.is_file():
        return ""
    words = version.read_text().partition("\n")[0].split()
    return next((f", driver {word}" for word in words if word[0].isdigit()), "")
