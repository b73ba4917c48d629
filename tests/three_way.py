"""Shared by the layers' tests: dtypes, sizes, and the three-way rule."""

from __future__ import annotations

import torch
from torch import Tensor

LOW_PRECISION = [torch.bfloat16, torch.float16]
ODD_SIZES = [1, 7, 33, 1023, 1024, 1500]


def assert_three_way(ours: Tensor, theirs: Tensor, exact: Tensor, atol: float) -> None:
    """Our error against float64 is at most twice PyTorch's in the same low precision, plus `atol`."""
    error = (ours.double() - exact).abs()
    allowed = 2.0 * (theirs.double() - exact).abs().max() + atol
    assert torch.isfinite(error).all()
    assert error.max() <= allowed, f"error {error.max():.3g}, PyTorch's {(allowed - atol) / 2:.3g}"
