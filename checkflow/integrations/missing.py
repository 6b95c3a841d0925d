"""The one line for a user who lacks the library of an integration."""

from __future__ import annotations


def missing(extra: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """What an integration raises where a module that it needs is not installed."""
    return ModuleNotFoundError(
        f"checkflow.integrations.{extra} needs {error.name}: pip install 'checkflow[{extra}]'", name=error.name
    )
