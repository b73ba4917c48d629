"""GELU and its derivative in float64, without the cancellation on the left that 1 + erf and 1 + tanh have."""

from __future__ import annotations

import math

import torch
from torch import Tensor

X_MIN = {"none": -0.7517915246935645, "tanh": -0.7524614220710163}
_LINEAR, _CUBIC = 2.0 * math.sqrt(2.0 / math.pi), 0.044715


def exact_gelu(x: Tensor, approximate: str) -> Tensor:
    x = x.double()
    if approximate == "tanh":
        return x * torch.sigmoid(_LINEAR * (x + _CUBIC * x**3))
    return 0.5 * x * torch.erfc(-x * math.sqrt(0.5))


def exact_derivative(x: Tensor, approximate: str) -> Tensor:
    x = x.double()
    if approximate == "tanh":
        inner = _LINEAR * (x + _CUBIC * x**3)
        return torch.sigmoid(inner) * (1.0 + x * _LINEAR * (1 + 3 * _CUBIC * x * x) * torch.sigmoid(-inner))
    return 0.5 * torch.erfc(-x * math.sqrt(0.5)) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
