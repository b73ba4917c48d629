from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tempo.gelu_coefficients import COEFFICIENTS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_script_regenerates_the_committed_coefficients() -> None:
    command = [sys.executable, "csrc/gelu/fit_gelu.py", "--print"]
    text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    module: dict = {}
    exec(text, module)
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
