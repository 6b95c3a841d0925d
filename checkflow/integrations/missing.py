"""The one line for a user who lacks the library of an integration, or has a version of it that lacks a module."""

from __future__ import annotations

import importlib.util

_PACKAGES = frozenset(("lightning", "transformers", "accelerate", "torchtitan", "torchdata", "tyro"))


def missing(extra: str, error: ImportError) -> ImportError:
    """What an integration raises where an import fails: the error itself, if the library's own lacks a package."""
    package = (error.name or "").partition(".")[0]
    if package not in _PACKAGES:
        return error
    install = f"pip install 'checkflow[{extra}]'"
    if importlib.util.find_spec(package) is None:
        return ModuleNotFoundError(f"checkflow.integrations.{extra} needs {package}: {install}", name=package)
    says = f"checkflow.integrations.{extra} does not know this version of {package} ({error}): {install}"
    return type(error)(says, name=error.name)
