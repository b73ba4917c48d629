"""The tests of the kernels once more, on the code paths for older CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tempo

OPS = ("dropout", "dropout_add_layer_norm", "gelu", "lamb", "layer_norm", "softmax_dropout")
FILES = [str(Path(__file__).with_name(f"test_{op}.py")) for op in OPS]


@pytest.mark.parametrize("instruction_set", ["baseline", "avx2"])
def test_the_kernels_for_older_cpus(instruction_set: str) -> None:
    if tempo.kernels.cpu_instruction_set() == "baseline":
        pytest.skip("the CPU has no other instruction set than the one tested already")
    package = str(Path(tempo.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", f"pythonpath={package}", *FILES],
        capture_output=True,
        text=True,
        env={**os.environ, "TEMPO_CPU_ISA": instruction_set},
        check=False,
    )
    assert result.returncode == 0, result.stdout
