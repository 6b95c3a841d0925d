"""What holds in every test: one thread for torch, and the same examples of hypothesis in every run.

``--quick`` (``make test``) runs one case of each test, or every case where a test is marked so, and nothing that is
marked slow. ``--rest`` runs what that leaves out or shortens. ``HYPOTHESIS_PROFILE=random`` draws other examples every
time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from benchmarks.gpu.worker import give_back_memory

torch.set_num_threads(1)

# No deadline, and no complaint of slow examples: how fast the machine is, is no property of the code.
_PATIENT = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True)
hypothesis.settings.register_profile("fixed", _PATIENT, derandomize=True, database=None)
hypothesis.settings.register_profile("quick", _PATIENT, derandomize=True, database=None, max_examples=10)
hypothesis.settings.register_profile("random", _PATIENT, derandomize=False)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture(autouse=True)
def _handlers_of_before() -> Iterator[None]:
    """What a program that was tried has set (a command line's own handlers) is not what the next test finds."""
    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
    before = [(number, signal.getsignal(number)) for number in numbers]
    yield
    for number, handler in before:
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Give back what killed jobs have left in shared memory, where nobody goes on from it."""
    if hasattr(session.config, "workerinput"):
        return
    ours = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    give_back_memory(lambda directory: directory.is_relative_to(ours))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="one case of each test, and nothing that is marked slow")
    parser.addoption("--rest", action="store_true", help="only what --quick leaves out or shortens")
    parser.addoption("--races", metavar="FILE", help="add the names of tests that pass now to FILE")


@pytest.hookimpl(optionalhook=True)  # `make faults` runs tests without xdist
def pytest_xdist_auto_num_workers() -> int:
    """Tests wait for processes and disks during a quarter of their time: others run meanwhile."""
    return 3 * len(os.sched_getaffinity(0)) // 2


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick"):
        hypothesis.settings.load_profile("quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``cuda`` need a GPU; those marked ``alone`` come last."""
    if config.getoption("--quick") or config.getoption("--rest"):
        _select(config, items)
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))


def _select(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen: set[str] = set()
    selected: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        another = test in seen and not item.get_closest_marker("every_case")
        seen.add(test)
        quick = not another and not item.get_closest_marker("slow")
        shortened = item.get_closest_marker("shortened") or hasattr(getattr(item, "obj", None), "hypothesis")
        wanted = quick if config.getoption("--quick") else not quick or shortened
        (selected if wanted else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = selected


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name tests that failed beside others, and pass alone: ``make check`` fails until somebody has looked."""
    if (file := config.getoption("--races")) is not None:
        passed = sorted({one.nodeid for one in terminalreporter.stats.get("passed", ()) if one.when == "call"})
        with Path(file).open("a") as races:
            races.writelines(f"{name}\n" for name in passed)
