"""What docs/how-to/report.md calls of wandb, which needs an account: the calls are kept."""

from __future__ import annotations

from typing import Any

calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []


class Run:
    def define_metric(self, *given: Any, **named: Any) -> None:
        calls.append(("define_metric", given, named))

    def log(self, *given: Any, **named: Any) -> None:
        calls.append(("log", given, named))


def init(*given: Any, **named: Any) -> Run:
    calls.append(("init", given, named))
    return Run()
