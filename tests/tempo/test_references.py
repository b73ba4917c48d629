"""The tests of the layers once more, on the PyTorch references: what runs where no compiler is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tempo

ROOT = Path(__file__).parents[2]
NAMES = ("attention", "dropout", "dropout_add_layer_norm", "gelu", "lamb", "layer_norm", "philox")


@pytest.mark.slow
def test_the_layers_hold_without_compiled_kernels(tmp_path: Path) -> None:
    if tempo.kernels.LIBRARY_PATH is None:
        pytest.skip("no kernels are built: the other tests ran on the references already")
    package = Path(tempo.__file__).parent
    shutil.copytree(package, tmp_path / "tempo", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    # Copied, so that the working tree's tempo is nowhere on the path.
    shutil.copytree(ROOT / "tests/tempo", tmp_path / "tests/tempo", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "tests/three_way.py", tmp_path / "tests")
    check = "import tempo\n\n\ndef test_which():\n    assert set(tempo.kernels.summary().values()) == {'reference'}\n"
    (tmp_path / "tests/tempo/test_which.py").write_text(check)
    files = [f"tests/tempo/test_{name}.py" for name in (*NAMES, "which")]
    options = ["-q", "-x", "-p", "no:cacheprovider", "--import-mode=importlib", "-o", "pythonpath=.", "-k", "not compile"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), *files],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "TEMPO_LIBRARY"},
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
