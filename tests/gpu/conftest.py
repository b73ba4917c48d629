"""Tests that need a CUDA device; where there is none they are skipped and say what is missing.

TEMPO_GPU_TESTS_DEVICE=cpu rehearses those that take the fixture `device` on a CPU, see test_rehearsal.py: with TEMPO_LIBRARY
naming the emulated CUDA kernels (tests/cuda_emulation/build.py), what runs are those.
"""

from __future__ import annotations

import os

import pytest
import torch

import tempo

DEVICE = torch.device(os.environ.get("TEMPO_GPU_TESTS_DEVICE", "cuda:0"))


def what_is_missing(kind: str) -> str | None:
    """Why tests of a device of this kind cannot run here; None where they can."""
    if kind == "cpu":
        return None
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is built without CUDA: these tests need a CUDA build and an NVIDIA GPU"
    if not torch.cuda.is_available():
        return "no CUDA device is visible: these tests need an NVIDIA GPU and its driver (nvidia-smi, CUDA_VISIBLE_DEVICES)"
    if not tempo.kernels.cuda_architectures():
        return "tempo's CUDA kernels are not built: TEMPO_CUDA=1 python setup.py build_ext --inplace"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever is marked `gpu` here needs CUDA, or with `device` among its fixtures any device."""
    for item in items:
        if item.get_closest_marker("gpu") is None:
            continue
        rehearsed = DEVICE.type == "cpu" and "device" in getattr(item, "fixturenames", ())
        missing = what_is_missing("cpu" if rehearsed else "cuda")
        if missing is None:
            continue
        kernels_only = torch.cuda.is_available() and os.environ.get("TEMPO_TEST_KERNELS") == "required"
        if not kernels_only:
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def device() -> torch.device:
    """A CUDA device; a test that takes it needs nothing of CUDA but its tensors."""
    missing = what_is_missing(DEVICE.type)
    assert missing is None, missing
    return DEVICE


@pytest.fixture
def cuda() -> torch.device:
    """A CUDA device, for tests that need streams, graphs or the like."""
    missing = what_is_missing("cuda")
    assert missing is None, missing
    return torch.device("cuda:0")
