"""The tests for GPUs, looked at where there is none: complete, skipped with a reason, and rehearsed on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tempo._library import OP_NAMES
from tests.gpu import conftest
from tests.gpu.op_cases import CASES

ROOT = Path(__file__).parents[2]


def test_every_op_has_a_case() -> None:
    assert {case.op for case in CASES} == set(OP_NAMES)


@pytest.mark.parametrize(
    ("cuda", "available", "kernels", "message"),
    [
        (None, False, [], "is built without CUDA"),
        ("13.0", False, [], "no CUDA device is visible"),
        ("13.0", True, [], "TEMPO_CUDA=1"),
    ],
)
def test_the_reason_for_skipping_names_what_is_missing(
    cuda: str | None, available: bool, kernels: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(conftest.tempo.kernels, "cuda_architectures", lambda: kernels)
    assert message in (conftest.what_is_missing("cuda") or "")
    assert conftest.what_is_missing("cpu") is None


def test_with_device_and_kernels_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(conftest.tempo.kernels, "cuda_architectures", lambda: ["90"])
    assert conftest.what_is_missing("cuda") is None


def run_pytest(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_without_a_gpu_all_are_skipped_with_a_reason() -> None:
    result = run_pytest("-m", "gpu", "tests/gpu", TEMPO_GPU_TESTS_DEVICE="cuda:0")
    assert result.returncode == 0, result.stdout[-3000:]
    last = result.stdout.strip().splitlines()[-1]
    assert "skipped" in last
    assert not {"passed", "failed", "error"} & set(last.replace(",", "").split())
    assert "need an NVIDIA GPU" in result.stdout or "need a CUDA build and an NVIDIA GPU" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ops", "layers", "bert", "numerics"])
def test_what_needs_no_cuda_holds_on_the_cpu(name: str) -> None:
    """Every line that a GPU would run but for streams, graphs and the like."""
    wanted = "not 65535 and not compiled and not opcheck"
    result = run_pytest("-m", "gpu", "-k", wanted, f"tests/gpu/test_{name}.py", TEMPO_GPU_TESTS_DEVICE="cpu")
    assert result.returncode == 0, result.stdout[-3000:]
    assert " passed" in result.stdout
