"""The compiled kernels, compared with the PyTorch references and with float64."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import tempo

SIZES = (1, 7, 33, 1023, 1024, 1500, 4097)
# TEMPO_LIBRARY: the CUDA kernels, emulated, which serve float16 as well (tests/cuda_emulation).
DTYPES = (torch.float32, torch.bfloat16, *((torch.float16,) if "TEMPO_LIBRARY" in os.environ else ()))


@pytest.fixture(autouse=True)
def _kernels() -> None:
    """Without the kernels these tests would compare the references with themselves."""
    if tempo.kernels.LIBRARY_PATH is not None:
        return
    message = "the compiled kernels are not built: pip install --no-deps --no-build-isolation -e ."
    if os.environ.get("TEMPO_TEST_KERNELS") == "required":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20221012)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """torch.set_num_threads, undone afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def _three_way(ours: Tensor, pytorch: Tensor, exact: Tensor, atol: float) -> None:
    """Assert |ours - exact| <= 2 max |pytorch - exact| + atol; `exact` is float64."""
    error, allowed = (ours.double() - exact).abs().max().item(), (pytorch.double() - exact).abs().max().item()
    assert error <= 2.0 * allowed + atol, f"error {error:.3g}, PyTorch's {allowed:.3g}, atol {atol:.3g}"


@pytest.fixture
def three_way() -> Callable[[Tensor, Tensor, Tensor, float], None]:
    return _three_way


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`size` and `dtype` arguments run over all odd sizes and all dtypes."""
    if "size" in metafunc.fixturenames:
        metafunc.parametrize("size", SIZES)
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", DTYPES, ids=[str(dtype).removeprefix("torch.") for dtype in DTYPES])
