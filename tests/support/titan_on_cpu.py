"""Import this before torchtitan where there is no GPU: torch for CPUs has no triton, which a kernel of its needs."""

from __future__ import annotations

import sys
from unittest.mock import MagicMock

import torch

torch._utils._get_available_device_type = lambda: "cpu"
sys.modules["torchtitan.models.moe.kernels"] = MagicMock()
