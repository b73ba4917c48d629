from __future__ import annotations

import os

import pytest
import torch

# TEMPO_TESTS_DEVICE=cuda runs these tests on a GPU: all tensors that name no device are made there (benchmarks/gpu_check.sh).
if "TEMPO_TESTS_DEVICE" in os.environ:
    torch.set_default_device(os.environ["TEMPO_TESTS_DEVICE"])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
