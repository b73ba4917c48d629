from __future__ import annotations

import pytest

from pretrain.schedule import learning_rate

PHASE_1 = {"name": "poly", "base": 6e-3, "warmup_proportion": 0.2843, "total_steps": 7038}
PHASE_2 = {"name": "poly", "base": 4e-3, "warmup_proportion": 0.128, "total_steps": 1563}


def test_poly_is_nvidias_formula() -> None:
    assert learning_rate(1, **PHASE_1) == pytest.approx(6e-3 / 7038 / 0.2843)
    assert learning_rate(2000, **PHASE_1) == pytest.approx(6e-3 * (2000 / 7038) / 0.2843)
    assert learning_rate(2001, **PHASE_1) == pytest.approx(6e-3 * (1 - 2001 / 7038) ** 0.5)
    assert learning_rate(7038, **PHASE_1) == 0.0


def test_phase_2_trains_with_a_positive_rate_of_its_own() -> None:
    rates = [learning_rate(t, **PHASE_2) for t in range(1, 1563)]
    assert min(rates) > 0
    assert rates[0] == pytest.approx(4e-3 / 1563 / 0.128)


@pytest.mark.parametrize(("name", "middle", "end"), [("linear", 0.5, 0.0), ("cosine", 0.5, 0.0), ("constant", 1.0, 1.0)])
def test_others_warm_up_to_the_base_and_then_fall(name: str, middle: float, end: float) -> None:
    def rate(t: int) -> float:
        return learning_rate(t, name=name, base=1.0, warmup_proportion=0.2, total_steps=100)

    assert rate(10) == pytest.approx(0.5)
    assert rate(20) == pytest.approx(1.0)
    assert rate(60) == pytest.approx(middle)
    assert rate(100) == pytest.approx(end)


@pytest.mark.parametrize("name", ["poly", "linear", "cosine", "constant"])
def test_no_warm_up_starts_near_the_base(name: str) -> None:
    assert learning_rate(1, name=name, base=1.0, warmup_proportion=0.0, total_steps=1000) == pytest.approx(1.0, abs=2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "step"}, r"schedule\.name must be one of poly"),
        ({"warmup_proportion": 1.0}, r"schedule\.warmup_proportion"),
        ({"warmup_proportion": -0.1}, r"schedule\.warmup_proportion"),
        ({"total_steps": 0}, r"train\.max_steps"),
    ],
)
def test_wrong_arguments_name_the_key(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        learning_rate(1, **{**PHASE_1, **change})


@pytest.mark.parametrize("step", [0, 7039])
def test_steps_outside_the_schedule_are_refused(step: int) -> None:
    with pytest.raises(ValueError, match=r"\[1, 7038\]"):
        learning_rate(step, **PHASE_1)
