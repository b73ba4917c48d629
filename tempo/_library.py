"""The op library `torch.ops.tempo`: schemas and references here in Python, compiled kernels beside them.

A reference is registered for every device (CompositeExplicitAutograd); a compiled kernel registers the same op for its
device's own dispatch key, which PyTorch prefers. The dispatcher is the only switch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("tempo", "DEF")

OP_NAMES: list[str] = []


def define(schema: str, reference: Callable, fake: Callable) -> None:
    """Register an op: its schema, the pure-PyTorch reference, and the shapes it returns.

    The reference is also the op `reference_<name>`: a kernel hands over to it what it does not serve (float64, for example).
    """
    name = schema.split("(", 1)[0]
    for prefix in ("", "reference_"):
        _LIBRARY.define(prefix + schema)
        _LIBRARY.impl(prefix + name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tempo::{name}", fake, lib=_LIBRARY)
    OP_NAMES.append(name)


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 (gradcheck), float32 for all else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cast_for_matmul(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to the dtype that autocast, where it is on, would take for a matrix product; autograd sees the cast."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)
