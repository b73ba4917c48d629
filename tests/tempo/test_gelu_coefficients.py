from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tempo.gelu_coefficients import COEFFICIENTS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def printed() -> tuple[str, str]:
    """The Python module and the CUDA header, as the script prints them."""
    command = [sys.executable, "csrc/gelu/fit_gelu.py", "--print", "--print-cuda"]
    text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    module, header = text.split("// Written by", 1)
    return module, "// Written by" + header


@pytest.mark.slow
def test_the_script_regenerates_the_committed_header(printed: tuple[str, str]) -> None:
    number = r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?f"
    committed = (ROOT / "csrc/gelu/gelu_pieces.cuh").read_text()
    again, kept = ([float(found[:-1]) for found in re.findall(number, text)] for text in (printed[1], committed))
    assert re.sub(number, "#", printed[1]) == re.sub(number, "#", committed)
    assert len(kept) > 100
    # Another linear-algebra library may round the fit differently; the smallest coefficients most.
    np.testing.assert_allclose(again, kept, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_the_script_regenerates_the_committed_coefficients(printed: tuple[str, str]) -> None:
    module: dict = {}
    exec(printed[0], module)
    again = module["COEFFICIENTS"]
    assert again.keys() == COEFFICIENTS.keys()
    for form, values in COEFFICIENTS.items():
        assert again[form].keys() == values.keys()
        for key, value in values.items():
            if not isinstance(value, dict):
                assert again[form][key] == value
                continue
            # Another linear-algebra library may round the fit differently in the last place.
            np.testing.assert_allclose(again[form][key]["polynomial"], value["polynomial"], rtol=1e-5)
            assert {k: v for k, v in again[form][key].items() if k != "polynomial"} == {
                k: v for k, v in value.items() if k != "polynomial"
            }
