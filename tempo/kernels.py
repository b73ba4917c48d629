"""Which implementation the dispatcher takes for each op."""

from __future__ import annotations

import torch

from tempo._library import OP_NAMES


def implementation(op: str, device_type: str) -> str:
    """Return "compiled" where a kernel for the device is registered for the op, else "reference"."""
    key = {"cpu": "CPU", "cuda": "CUDA"}[device_type]
    compiled = torch._C._dispatch_has_kernel_for_dispatch_key(f"tempo::{op}", key)
    return "compiled" if compiled else "reference"


def summary(device_type: str = "cpu") -> dict[str, str]:
    """Return op name -> "compiled" or "reference" for a device type ("cpu" or "cuda")."""
    return {op: implementation(op, device_type) for op in OP_NAMES}


def require(device_type: str) -> None:
    """Raise where an op would run as its PyTorch reference.

    Raises:
        ValueError: names the ops without a compiled kernel.
    """
    missing = [op for op, how in summary(device_type).items() if how == "reference"]
    if missing:
        raise ValueError(
            f"tempo.kernels is 'required', but no compiled {device_type} kernel is installed for: {', '.join(missing)};"
            " set tempo.kernels to 'auto' to use the PyTorch reference"
        )
