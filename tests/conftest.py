"""One thread for torch in every test: the machines that run them have two cores, and spinning threads are no test.

Tests with the marker "cuda" are skipped where torch has no CUDA GPU.
"""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is not None and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
