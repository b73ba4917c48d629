"""The compiled kernels: loads them where they are built, and tells which implementation the dispatcher takes for each op."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from tempo._library import OP_NAMES


def _load() -> Path | None:
    """Load the compiled library beside this file, or the one that TEMPO_LIBRARY names; None where it was not built.

    Raises:
        ImportError: it is there but does not load, or there are several.
    """
    named = os.environ.get("TEMPO_LIBRARY")
    found = [Path(named)] if named else sorted(Path(__file__).parent.glob("_C*.so"))
    if not found:
        return None
    if len(found) > 1:
        raise ImportError(f"several compiled libraries of tempo, of which one must be stale: {', '.join(map(str, found))}")
    try:
        torch.ops.load_library(str(found[0]))
    except OSError as error:
        raise ImportError(
            f"the compiled kernels {found[0]} do not load with torch {torch.__version__}: {error}. Build them again"
            " (pip install --force-reinstall --no-deps .), or delete that file to run the PyTorch references"
        ) from error
    return found[0]


LIBRARY_PATH = _load()


def cpu_instruction_set() -> str | None:
    """Return "baseline", "avx2" or "avx512", which the CPU kernels use here; None where they are not built."""
    if LIBRARY_PATH is None:
        return None
    name = ctypes.CDLL(str(LIBRARY_PATH)).tempo_cpu_isa
    name.restype = ctypes.c_char_p
    return name().decode()


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
