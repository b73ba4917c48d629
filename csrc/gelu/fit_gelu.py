"""Fit GELU' as a function of GELU's output; write tempo/gelu_coefficients.py and csrc/gelu/gelu_pieces.cuh.

    python csrc/gelu/fit_gelu.py                     # writes both
    python csrc/gelu/fit_gelu.py --print             # prints the Python module
    python csrc/gelu/fit_gelu.py --print-cuda        # prints the CUDA header

With y = GELU(x), its minimum y_min at x_min, t = sqrt(y - y_min), q = sqrt(log2(y_min / y)) and E = 2^(-beta y^2 log2 e):

    low, right of x_min    1 + E (k + t P(t))      k = -exp(beta y_min^2), so that it is 0 at the minimum and 1 far right
    low, left              y q P(q)                0 at y = 0 without a cut-off
    high, right            t P(t) up to t = 1.2, then 1 + E P(t)
    high, left             -t P(t) up to t = 0.28, then y P(q)

"low" serves 16-bit outputs, "high" float32. For the CUDA kernels GELU itself as well, with Phi the normal distribution function:

    near the minimum       y = y_min + d^2 P(d), d = x - x_min, |d| <= 0.4: right to half a unit in the last place
    elsewhere, erf form    high: Phi(-a) = exp(-a^2 / 2) t P(t), t = 1 / (1 + 0.3 a), a >= 0
                           low:  Phi(-a) = 2^-(1 + a P(a)), a <= 13.5: few instructions, right to 2^-14 of itself

Each P is the minimax polynomial (Remez exchange on a fine grid, in float64) of
values computed with 40 digits, its coefficients rounded to float32. Needs numpy and mpmath; half a minute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mpmath as mp
import numpy as np
from numpy.polynomial import chebyshev

mp.mp.dps = 40
OUTPUT = Path(__file__).resolve().parents[2] / "tempo/gelu_coefficients.py"
CUDA_OUTPUT = Path(__file__).with_name("gelu_pieces.cuh")
NEAR_MINIMUM = 0.4
TAIL_SCALE = 0.3
LOW_TAIL_END = 13.5
LOG2_E = float(1 / mp.log(2))

Function = Callable[[mp.mpf], mp.mpf]


@dataclass(frozen=True)
class Form:
    """One form of GELU: the function, its derivative, and the widths of its Gaussian factors."""

    gelu: Function
    derivative: Function
    low_beta: float
    high_beta: float


def erf_form() -> Form:
    return Form(lambda x: x * mp.ncdf(x), lambda x: mp.ncdf(x) + x * mp.npdf(x), low_beta=0.6, high_beta=0.55)


def tanh_form() -> Form:
    """x times a logistic function, so that nothing cancels on the left."""
    k, cubic = mp.sqrt(2 / mp.pi), mp.mpf("0.044715")

    def logistic(x: mp.mpf) -> mp.mpf:
        return 1 / (1 + mp.exp(-2 * k * (x + cubic * x**3)))

    def derivative(x: mp.mpf) -> mp.mpf:
        s = logistic(x)
        return s + x * 2 * k * (1 + 3 * cubic * x * x) * s * (1 - s)

    return Form(lambda x: x / (1 + mp.exp(-2 * k * (x + cubic * x**3))), derivative, low_beta=0.65, high_beta=0.5)


@dataclass(frozen=True)
class Branch:
    """One side of the minimum, sampled in a variable v that gives y = value(v)."""

    form: Form
    x_min: mp.mpf
    right: bool
    value: Function

    def invert(self, y: mp.mpf) -> mp.mpf:
        low, high = (self.x_min, mp.mpf(20)) if self.right else (mp.mpf(-40), self.x_min)
        for _ in range(140):
            middle = (low + high) / 2
            if (self.form.gelu(middle) < y) == self.right:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def sample(self, start: float, stop: float, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (v, y, GELU') at the Chebyshev extrema of [start, stop], float64."""
        rows = []
        for i in range(count):
            v = mp.mpf(start) + (mp.mpf(stop) - mp.mpf(start)) * (1 - mp.cos(mp.pi * i / (count - 1))) / 2
            y = self.value(v)
            rows.append((float(v), float(y), float(self.form.derivative(self.invert(y)))))
        v, y, derivative = np.array(rows).T
        return v, y, derivative


def minimax(v: np.ndarray, target: np.ndarray, weight: np.ndarray, degree: int) -> np.ndarray:
    """Chebyshev coefficients on [v[0], v[-1]] of the P that minimises max |target - weight P|: Remez exchange."""
    scaled = (2 * v - v[0] - v[-1]) / (v[-1] - v[0])
    basis = chebyshev.chebvander(scaled, degree) * weight[:, None]
    num_extrema = degree + 2
    index = np.round(np.linspace(1, len(v) - 1, num_extrema)).astype(int)
    best, best_error = np.zeros(degree + 1), np.inf
    for _ in range(80):
        system = np.c_[basis[index], (-1.0) ** np.arange(num_extrema)]
        solution = np.linalg.solve(system, target[index])
        residual = target - basis @ solution[:-1]
        error = float(np.abs(residual).max())
        if error < best_error:
            best, best_error = solution[:-1].copy(), error
        if error <= abs(solution[-1]) * 1.0002:
            break
        signs = np.where(np.sign(residual) == 0, 1, np.sign(residual))
        runs = np.split(np.arange(len(residual)), np.flatnonzero(np.diff(signs)) + 1)
        extrema = [run[np.abs(residual[run]).argmax()] for run in runs]
        while len(extrema) > num_extrema:
            drop_first = abs(residual[extrema[0]]) < abs(residual[extrema[-1]])
            extrema = extrema[1:] if drop_first else extrema[:-1]
        if len(extrema) < num_extrema:
            break
        index = np.array(extrema)
    return best


def to_powers(coefficients: np.ndarray, start: float, stop: float, center: float) -> list[float]:
    """Chebyshev coefficients on [start, stop] as powers of (v - center), exactly, then rounded to float32."""
    half, middle = mp.mpf(stop - start) / 2, mp.mpf(start + stop) / 2
    in_z = [mp.mpf(0)] * len(coefficients)
    for k, coefficient in enumerate(coefficients):
        for j, factor in enumerate(chebyshev.cheb2poly([0] * k + [1])):
            in_z[j] += mp.mpf(float(coefficient)) * round(factor)
    shift = (mp.mpf(center) - middle) / half
    powers = [mp.mpf(0)] * len(coefficients)
    for j, factor in enumerate(in_z):
        for i in range(j + 1):
            powers[i] += factor * mp.binomial(j, i) * shift ** (j - i) * half ** (-i)
    return [float(np.float32(float(power))) for power in powers]


def polynomial(v: np.ndarray, target: np.ndarray, weight: np.ndarray, degree: int, center: float = 0.0) -> dict:
    return {"center": center, "polynomial": to_powers(minimax(v, target, weight, degree), v[0], v[-1], center)}


def round_32(x: float) -> float:
    return float(np.float32(x))


def fit(form: Form) -> dict:
    """Return everything that `tempo.gelu` needs of one form."""
    x_min = mp.findroot(form.derivative, -0.75)
    y_min = form.gelu(x_min)
    high = round_32(float(y_min))
    log2_depth = mp.log(-y_min, 2)
    right = Branch(form, x_min, True, lambda t: y_min + t * t)
    left = Branch(form, x_min, False, lambda t: y_min + t * t)
    far_left = Branch(form, x_min, False, lambda q: y_min * mp.mpf(2) ** (-q * q))
    result = {
        "x_min": float(x_min),
        "y_min_high": high,
        "y_min_low": round_32(float(y_min - mp.mpf(high))),
        "log2_depth": round_32(float(log2_depth)),
    }

    t, y, d = right.sample(0, 2.484, 900)
    gauss, k = np.exp(-form.low_beta * y * y), -float(np.exp(form.low_beta * float(y_min) ** 2))
    low_right = {"beta_log2e": round_32(form.low_beta * LOG2_E), "k": round_32(k)}
    result["low_right"] = low_right | polynomial(t, d - 1 - gauss * k, gauss * t, 6)
    q, y, d = far_left.sample(0, 4.8, 900)
    result["low_left"] = polynomial(q, d, y * q, 4)

    t, y, d = right.sample(0, 1.2 * 1.002, 700)
    result["high_right_near"] = polynomial(t, d, t, 9, 0.6)
    t, y, d = right.sample(1.2 * 0.998, 2.6, 700)
    far = polynomial(t, d - 1, np.exp(-form.high_beta * y * y), 8, 1.7)
    result["high_right_far"] = {"beta_log2e": round_32(form.high_beta * LOG2_E)} | far
    t, y, d = left.sample(0, 0.28 * 1.003, 700)
    result["high_left_near"] = polynomial(t, d, -t, 7, 0.14)
    start = float(mp.sqrt(log2_depth - mp.log(-(y_min + mp.mpf(0.28 * 0.997) ** 2), 2)))
    q, y, d = far_left.sample(start, 5.0, 700)
    result["high_left_far"] = polynomial(q, d, y, 7, 2.0)
    return result


def fit_near_minimum(form: Form) -> list[float]:
    """P of GELU(x) = y_min + d^2 P(d)."""
    x_min = mp.findroot(form.derivative, -0.75)
    y_min = form.gelu(x_min)
    d = NEAR_MINIMUM * np.cos(np.pi * np.arange(400) / 399)[::-1]
    bowl = np.array([float((form.gelu(x_min + mp.mpf(v)) - y_min) / mp.mpf(v) ** 2) for v in d])
    return to_powers(minimax(d, bowl * d * d, d * d, 6), d[0], d[-1], 0.0)


def fit_high_tail() -> list[float]:
    """P of Phi(-a) = exp(-a^2 / 2) t P(t); the error is relative."""
    start = 1 / (1 + 14 * TAIL_SCALE)
    t = start + (1 - start) * (1 - np.cos(np.pi * np.arange(600) / 599)) / 2
    a = [(1 / mp.mpf(v) - 1) / mp.mpf(TAIL_SCALE) for v in t]
    value = np.array([float(mp.ncdf(-p) * mp.exp(p * p / 2)) for p in a])
    return to_powers(minimax(t, np.ones_like(t), t / value, 9), t[0], t[-1], 0.0)


def fit_low_tail() -> list[float]:
    """P of Phi(-a) = 2^-(1 + a P(a)); an error of the exponent is a relative one of Phi."""
    a = LOW_TAIL_END * (1 - np.cos(np.pi * np.arange(800) / 799)) / 2
    exponent = np.array([float(-mp.log(mp.ncdf(-mp.mpf(v)), 2)) for v in a]) - 1
    return to_powers(minimax(a, exponent, np.maximum(a, 1e-12), 8), a[0], a[-1], 0.0)


def literal(value: float) -> str:
    return f"{round_32(value)!r}f"


def float_above(x: float) -> float:
    """The smallest float32 that is not below `x`: comparing a float32 with it is comparing with `x`."""
    nearest = np.float32(x)
    return float(nearest if float(nearest) >= x else np.nextafter(nearest, np.float32(np.inf)))


def horner(name: str, variable: str, powers: list[float], center: float = 0.0) -> list[str]:
    """A device function with its coefficients as literals."""
    shifted = variable if center == 0.0 else "u"
    lines = [f"  __device__ static float {name}(float {variable}) {{"]
    if center != 0.0:
        lines.append(f"    const float u = {variable} - {literal(center)};")
    lines.append(f"    float p = {literal(powers[-1])};")
    lines += [f"    p = fmaf(p, {shifted}, {literal(power)});" for power in powers[-2::-1]]
    return [*lines, "    return p;", "  }"]


def render_cuda(coefficients: dict[str, dict]) -> str:
    """Return the CUDA header."""
    lines = ["// Written by csrc/gelu/fit_gelu.py, which describes the pieces: do not edit by hand.", "#pragma once"]
    lines += ['#include "common/gpu.h"', "", "namespace tempo {", "namespace cuda {", ""]
    for struct, name, form in (("ErfPieces", "none", erf_form()), ("TanhPieces", "tanh", tanh_form())):
        c = coefficients[name]
        x_high = round_32(c["x_min"])
        scalars = {
            "kXMinAbove": float_above(c["x_min"]),
            "kXMinHigh": x_high,
            "kXMinLow": c["x_min"] - x_high,
            "kYMinHigh": c["y_min_high"],
            "kYMinLow": c["y_min_low"],
            "kLog2Depth": c["log2_depth"],
            "kLowBeta": c["low_right"]["beta_log2e"],
            "kLowK": c["low_right"]["k"],
            "kHighBeta": c["high_right_far"]["beta_log2e"],
        }
        lines.append(f"struct {struct} {{")
        lines += [f"  static constexpr float {key} = {literal(value)};" for key, value in scalars.items()]
        for key, variable in (("low_right", "t"), ("low_left", "q"), ("high_right_near", "t"), ("high_right_far", "t")):
            lines += horner(key, variable, c[key]["polynomial"], c[key]["center"])
        for key, variable in (("high_left_near", "t"), ("high_left_far", "q")):
            lines += horner(key, variable, c[key]["polynomial"], c[key]["center"])
        lines += horner("near_minimum", "d", fit_near_minimum(form))
        lines += ["};", ""]
    lines += [f"constexpr float kNearMinimum = {literal(NEAR_MINIMUM)}, kTailScale = {literal(TAIL_SCALE)};"]
    lines += [f"constexpr float kLowTailEnd = {literal(LOW_TAIL_END)};", ""]
    lines += ["struct NormalTail {", *horner("high", "t", fit_high_tail()), *horner("low", "a", fit_low_tail()), "};", ""]
    return "\n".join([*lines, "}  // namespace cuda", "}  // namespace tempo", ""])


def render(coefficients: dict[str, dict]) -> str:
    """Return the Python module."""
    title = "Coefficients of GELU'(x) as a function of y = GELU(x), fitted by csrc/gelu/fit_gelu.py: do not edit by hand."
    lines = [f'"""{title}"""', "", "from __future__ import annotations", "", "COEFFICIENTS: dict[str, dict] = {"]
    for name, form in coefficients.items():
        lines.append(f'    "{name}": {{')
        for key, value in form.items():
            if not isinstance(value, dict):
                lines.append(f'        "{key}": {value!r},')
                continue
            lines.append(f'        "{key}": {{')
            lines += [f'            "{part}": {number!r},' for part, number in value.items() if part != "polynomial"]
            lines.append('            "polynomial": [')
            lines += [f"                {number!r}," for number in value["polynomial"]]
            lines += ["            ],", "        },"]
        lines.append("    },")
    return "\n".join([*lines, "}", ""])


def main() -> None:
    coefficients = {"none": fit(erf_form()), "tanh": fit(tanh_form())}
    if "--print" in sys.argv[1:]:
        print(render(coefficients), end="")
    if "--print-cuda" in sys.argv[1:]:
        print(render_cuda(coefficients), end="")
    if not sys.argv[1:]:
        OUTPUT.write_text(render(coefficients), encoding="utf-8")
        CUDA_OUTPUT.write_text(render_cuda(coefficients), encoding="utf-8")
        print(f"wrote {OUTPUT} and {CUDA_OUTPUT}")


if __name__ == "__main__":
    main()
