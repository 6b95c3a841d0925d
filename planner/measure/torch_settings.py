"""Restores torch's process-wide settings, which a model file may change for its own plan only."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_Setting = tuple[Callable[[], Any], Callable[[Any], None]]


def _attribute(owner: Any, name: str) -> _Setting:
    return functools.partial(getattr, owner, name), functools.partial(setattr, owner, name)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(mode: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


def _products() -> str | None:
    """Read the oldest of three interfaces for TF32; None where it refuses, because another one was used."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_products(precision: str | None) -> None:
    if precision is not None:
        torch.set_float32_matmul_precision(precision)


def _default_device() -> torch.device | None:
    """Return what ``torch.set_default_device`` set, or None; the device may not exist here."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _settings() -> list[_Setting]:
    """List what is read before and written back after, the general before the special."""
    backends = torch.backends
    precisions: list[Any] = [
        backends,
        backends.cudnn,
        backends.cudnn.conv,  # type: ignore[attr-defined]
        backends.cudnn.rnn,
        backends.cuda.matmul,
        backends.mkldnn,
        backends.mkldnn.matmul,  # type: ignore[attr-defined]
        backends.mkldnn.conv,  # type: ignore[attr-defined]
    ]
    return [
        (torch.get_default_dtype, torch.set_default_dtype),
        (_default_device, torch.set_default_device),
        (torch.is_grad_enabled, torch._C._set_grad_enabled),
        (_deterministic, _set_deterministic),
        *(_attribute(backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
        (backends.cuda.flash_sdp_enabled, backends.cuda.enable_flash_sdp),
        (backends.cuda.mem_efficient_sdp_enabled, backends.cuda.enable_mem_efficient_sdp),
        (backends.cuda.math_sdp_enabled, backends.cuda.enable_math_sdp),
        (backends.cuda.cudnn_sdp_enabled, backends.cuda.enable_cudnn_sdp),
        *(_attribute(owner, "fp32_precision") for owner in precisions),
        (_products, _set_products),
    ]


@contextlib.contextmanager
def torch_settings_kept() -> Iterator[None]:
    """Restore settings that have changed; leaves the others alone, since a value may be inherited."""
    before = [(read, write, read()) for read, write in _settings()]
    try:
        yield
    finally:
        for read, write, value in before * 2:  # twice: restoring one setting may change another
            if read() != value:
                write(value)
