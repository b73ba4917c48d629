"""The compiled kernels: loads them where they are built, and tells which implementation the dispatcher takes for each op."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import warnings
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


def _ask(name: str) -> str | None:
    """Call a function of the library that returns a string; None where the library lacks it."""
    function = getattr(ctypes.CDLL(str(LIBRARY_PATH)), name, None) if LIBRARY_PATH else None
    if function is None:
        return None
    function.restype = ctypes.c_char_p
    return function().decode()


def cpu_instruction_set() -> str | None:
    """Return "baseline", "avx2" or "avx512", which the CPU kernels use here; None where they are not built."""
    return _ask("tempo_cpu_isa")


def cuda_architectures() -> list[str]:
    """Return the compute capabilities that the CUDA kernels are built for, as in TEMPO_CUDA_ARCHS; empty where there are none."""
    return (_ask("tempo_cuda_archs") or "").split()


def covers(architectures: list[str], capability: tuple[int, int]) -> bool:
    """Whether kernels built for `architectures` ("80", "9.0", "90a", "120+PTX") run on a GPU of this compute capability.

    Machine code runs on GPUs of the same major number and at least its minor number; PTX on all that are not older.
    """
    for architecture in architectures:
        found = re.fullmatch(r"(\d+)(\d)([a-z]?)(\+PTX)?", architecture.replace(".", ""))
        if found is None:
            continue
        built = (int(found[1]), int(found[2]))
        if found[3]:  # for exactly this GPU
            if built == capability:
                return True
        elif (built[0] == capability[0] and built <= capability) or (found[4] and built <= capability):
            return True
    return False


def _installed_gpus() -> list[tuple[str, tuple[int, int]]]:
    """Name and compute capability of the GPUs in this machine, from the driver's NVML: that leaves CUDA uninitialised, which a
    process that forks later needs. Empty where there is no driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    gpus = []
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        device, major, minor, name = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(96)
        found = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0
        found = found and nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) == 0
        if found:
            nvml.nvmlDeviceGetName(device, name, len(name))
            gpus.append((name.value.decode(errors="replace"), (major.value, minor.value)))
    nvml.nvmlShutdown()
    return gpus


def _warn_of_uncovered_gpus(architectures: list[str], gpus: list[tuple[str, tuple[int, int]]]) -> None:
    for name, (major, minor) in sorted(set(gpus)):
        if covers(architectures, (major, minor)):
            continue
        toolkit = " with a CUDA 12 toolkit (13 no longer builds for it)" if (major, minor) < (7, 5) else ""
        warnings.warn(
            f"tempo's CUDA kernels were built for compute capabilities {' '.join(architectures)}, not for"
            f" {name} ({major}.{minor}): build tempo-bert again with TEMPO_CUDA_ARCHS={major}{minor}{toolkit}",
            stacklevel=2,
        )


def describe() -> str:
    """Return one line: which ops have compiled kernels here, for which instruction set and which GPUs."""
    if LIBRARY_PATH is None:
        return "no compiled kernels: all ops run as PyTorch references"
    missing = [op for op, how in summary("cpu").items() if how == "reference"]
    cuda = cuda_architectures()
    return (
        f"compiled kernels for {len(OP_NAMES) - len(missing)} of {len(OP_NAMES)} ops"
        f"{' (not ' + ', '.join(missing) + ')' if missing else ''}; CPU: {cpu_instruction_set()};"
        f" CUDA: {'compute capabilities ' + ' '.join(cuda) if cuda else 'not built'}"
    )


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


def _report_at_import() -> None:
    """Called when all ops are defined: says which ops are compiled (log level INFO), and warns of GPUs that the kernels miss."""
    logging.getLogger("tempo").info(describe())
    architectures = cuda_architectures()
    if architectures:
        _warn_of_uncovered_gpus(architectures, _installed_gpus())
