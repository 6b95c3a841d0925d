"""One thread for torch in every test: the machines that run them have two cores, and spinning threads are no test."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
