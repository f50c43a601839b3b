"""How much of what a device can do a training makes use of."""

from __future__ import annotations

import time

import torch

SIZES = {"cpu": 1024}  # of the matrices that the rate is measured with; other devices:
LARGE = 8192
ROUNDS = 3


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second that matrix multiplications of this dtype reach here, at best.

    Model-FLOP utilisation (arXiv 2204.02311, appendix B) is against what the maker promises; what a large product
    really reaches is known for every device, and no table is needed.
    """
    size = SIZES.get(device.type, LARGE)
    left = torch.ones(size, size, device=device, dtype=dtype)
    right = torch.ones(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(ROUNDS + 1):  # the first one is slower
        _wait(device)
        began = time.perf_counter()
        torch.mm(left, right)
        _wait(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
