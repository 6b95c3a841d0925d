"""The one line for a user who lacks the library of an integration."""

from __future__ import annotations

_PACKAGES = frozenset(("lightning", "transformers", "accelerate", "torchtitan", "torchdata", "tyro"))


def missing(extra: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """What an integration raises where a module is not installed: the error itself, if the library's own lacks it."""
    package = (error.name or "").partition(".")[0]
    if package not in _PACKAGES:
        return error
    return ModuleNotFoundError(
        f"checkflow.integrations.{extra} needs {package}: pip install 'checkflow[{extra}]'", name=package
    )
