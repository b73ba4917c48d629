"""Tensors of more than 2^31 elements: every index has to be 64 bits wide."""

from __future__ import annotations

import pytest
import torch

import tempo
from tests.gpu.op_cases import ops

pytestmark = pytest.mark.gpu

# 2^31 + 262,144 elements, as rows of one pattern whose length is a multiple of 8 (a byte of side bits ends with a row).
ROWS, COLUMNS = 32_768, 65_544
ELEMENT_BYTES = 2
GIB = 1 << 30


def need_memory(device: torch.device, num_tensors: int) -> None:
    """Skip where `num_tensors` of these do not fit."""
    torch.cuda.empty_cache()
    needed = num_tensors * ROWS * COLUMNS * ELEMENT_BYTES + GIB
    free, _ = torch.cuda.mem_get_info(device)
    if free < needed:
        pytest.skip(f"needs {needed / GIB:.0f} GiB of GPU memory, {free / GIB:.0f} GiB are free")


def assert_every_row_equals(tensor: torch.Tensor, row: torch.Tensor) -> None:
    for part in tensor.view(ROWS, -1).split(ROWS // 16):  # the comparison of all at once would be as large again
        assert bool((part == row).all())


def test_gelu(cuda: torch.device) -> None:
    need_memory(cuda, 4)
    pattern = torch.randn(COLUMNS, device=cuda, dtype=torch.bfloat16)
    x = pattern.expand(ROWS, COLUMNS).contiguous()
    y_row, side_row = ops.gelu_forward(pattern, "none", 1)
    y, side = ops.gelu_forward(x, "none", 1)
    assert_every_row_equals(y, y_row)
    assert_every_row_equals(side, side_row)
    dx = ops.gelu_backward(x, y, side, "none", 1)
    assert_every_row_equals(dx, ops.gelu_backward(pattern, y_row, side_row, "none", 1))
    ops.gelu_forward_(x, "none", 1)
    assert_every_row_equals(x, y_row)


@pytest.mark.parametrize("columns", [COLUMNS, COLUMNS + 1])
def test_dropout(columns: int, cuda: torch.device) -> None:
    """The masks of the last samples do not depend on how many came before them in the same call."""
    need_memory(cuda, 3)
    x = torch.ones(ROWS, columns, device=cuda, dtype=torch.bfloat16)
    y = ops.dropout(x, 0.1, tempo.make_rng(7, 5, cuda), 3)
    for first, count in ((0, 2), (ROWS // 2, 3), (ROWS - 4, 4)):
        expected = ops.reference_dropout(x[:count].contiguous(), 0.1, tempo.make_rng(7, 5 + first, cuda), 3)
        assert torch.equal(y[first : first + count], expected)
