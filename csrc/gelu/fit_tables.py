"""Fit the piecewise polynomials of the CPU's GELU and write csrc/gelu/gelu_tables.h.

    python csrc/gelu/fit_tables.py            # writes the header
    python csrc/gelu/fit_tables.py --print    # prints it

Eight pieces, because one AVX2 permute looks a coefficient up in eight. Needs numpy and mpmath.

Forward. GELU(x) = x - h(x) for x >= 0 and -h(-x) for x < 0, both for the erf and for the tanh form, with h(a) = -GELU(-a). h is
fitted on [0, 3) in pieces of 3/8. Pieces 1 and 2 are expanded about the minimum, where h is flat: what is added to the
leading constant is then small, and the sum is right to about half a unit in the last place, which the backward pass needs.

Derivative from the input, for the MLP that keeps it: GELU'(-a) on the same pieces, and GELU'(a) = 1 - GELU'(-a).

Backward. GELU' as a function of t = sqrt(y - y_min). Right of the minimum: GELU' = t P(t) in pieces of 1/2. Left of it
GELU' = t P(t) for t < 0.28, else y P(q) with q = sqrt(log2(y_min / y)), as in tempo/gelu.py.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import mpmath as mp
import numpy as np

mp.mp.dps = 40
DEGREE = 7
NUM_NODES = 64
NUM_PIECES = 8
FORWARD_WIDTH = 0.375
RIGHT_WIDTH = 0.5
RIGHT_END = 2.6
LEFT_SPLIT = 0.28
LEFT_LIMIT = 5.0

Function = Callable[[mp.mpf], mp.mpf]


def erf_form() -> tuple[Function, Function]:
    """GELU and its derivative, x Phi(x)."""
    return lambda x: x * mp.ncdf(x), lambda x: mp.ncdf(x) + x * mp.npdf(x)


def tanh_form() -> tuple[Function, Function]:
    """GELU and its derivative in the tanh form, written with a logistic function so that nothing cancels on the left."""
    k, cubic = 2 * mp.sqrt(2 / mp.pi), mp.mpf("0.044715")

    def logistic(x: mp.mpf) -> mp.mpf:
        return 1 / (1 + mp.exp(-k * (x + cubic * x**3)))

    def derivative(x: mp.mpf) -> mp.mpf:
        s = logistic(x)
        return s + x * k * (1 + 3 * cubic * x * x) * s * (1 - s)

    return lambda x: x * logistic(x), derivative


def nodes(low: float, high: float) -> list[mp.mpf]:
    """Chebyshev points of [low, high]."""
    middle, half = mp.mpf(low + high) / 2, mp.mpf(high - low) / 2
    return [middle - half * mp.cos(mp.pi * (2 * i + 1) / (2 * NUM_NODES)) for i in range(NUM_NODES)]


def least_squares(u: list[mp.mpf], values: list[mp.mpf], weights: list[mp.mpf], degree: int) -> np.ndarray:
    """Polynomial coefficients of `values` over `u`, lowest first, minimising weights * error at Chebyshev points."""
    scale = max(abs(float(v)) for v in u)
    w = np.array([float(v) for v in weights])
    powers = np.vander(np.array([float(v) for v in u]) / scale, degree + 1, increasing=True)
    solution, *_ = np.linalg.lstsq(powers * w[:, None], np.array([float(v) for v in values]) * w, rcond=None)
    return solution / scale ** np.arange(degree + 1)


def invert(gelu: Function, y: mp.mpf, low: mp.mpf, high: mp.mpf, rising: bool) -> mp.mpf:
    for _ in range(130):
        middle = (low + high) / 2
        if (gelu(middle) < y) == rising:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def fit_forward(gelu: Function, a_min: float) -> dict[str, list[float]]:
    """Tables for h(a) = constant + (constant_low + u P(u)), u = a - center."""
    table: dict[str, list[float]] = {name: [] for name in ("center", "constant", "constant_low")}
    table |= {f"c{k}": [] for k in range(1, DEGREE + 1)}
    for piece in range(NUM_PIECES):
        low, high = piece * FORWARD_WIDTH, (piece + 1) * FORWARD_WIDTH
        center = float(np.float32({0: 0.0, 1: a_min, 2: a_min}.get(piece, (low + high) / 2)))
        h_center = -gelu(-mp.mpf(center))
        points = nodes(low, high)
        u = [a - mp.mpf(center) for a in points]
        h = [-gelu(-a) for a in points]
        # (h - h(center)) / u is a polynomial; weights make the error of h relative to h.
        slopes = [(value - h_center) / v for value, v in zip(h, u, strict=True)]
        weights = [abs(v) / value for value, v in zip(h, u, strict=True)]
        coefficients = least_squares(u, slopes, weights, DEGREE - 1)
        constant = float(np.float32(float(h_center)))
        table["center"].append(center)
        table["constant"].append(constant)
        table["constant_low"].append(float(h_center - mp.mpf(constant)))
        for k in range(1, DEGREE + 1):
            table[f"c{k}"].append(float(coefficients[k - 1]))
    return table


def fit_derivative(derivative: Function, centers: list[float]) -> list[list[float]]:
    """Coefficients, by power and piece, of GELU'(-a) about the centers of the forward pieces."""
    pieces = []
    for piece, center in enumerate(centers):
        points = nodes(piece * FORWARD_WIDTH, (piece + 1) * FORWARD_WIDTH)
        u = [a - mp.mpf(center) for a in points]
        pieces.append(least_squares(u, [derivative(-a) for a in points], [mp.mpf(1)] * len(u), DEGREE))
    return [[float(coefficients[k]) for coefficients in pieces] for k in range(DEGREE + 1)]


def fit_backward(gelu: Function, derivative: Function, x_min: mp.mpf) -> dict[str, list[float]]:
    """Tables for GELU' = factor * P(v - center): pieces 0..4 right of the minimum, 5 left near it, 6 and 7 left far from it."""
    y_min = gelu(x_min)
    table: dict[str, list[float]] = {"center": []} | {f"c{k}": [] for k in range(DEGREE + 1)}

    def add(center: float, v: list[mp.mpf], factors: list[mp.mpf], values: list[mp.mpf]) -> None:
        center = float(np.float32(center))
        u = [p - mp.mpf(center) for p in v]
        ratios = [value / factor for value, factor in zip(values, factors, strict=True)]
        coefficients = least_squares(u, ratios, [abs(f) for f in factors], DEGREE)
        table["center"].append(center)
        for k in range(DEGREE + 1):
            table[f"c{k}"].append(float(coefficients[k]))

    edges = [0.0, 0.5, 1.0, 1.5, 2.0, RIGHT_END]
    for low, high in itertools.pairwise(edges):
        t = nodes(low, high)
        x = [invert(gelu, y_min + p * p, x_min, mp.mpf(20), True) for p in t]
        add((low + high) / 2, t, t, [derivative(p) for p in x])
    t = nodes(0.0, LEFT_SPLIT * 1.003)
    x = [invert(gelu, y_min + p * p, mp.mpf(-40), x_min, False) for p in t]
    add(LEFT_SPLIT / 2, t, t, [derivative(p) for p in x])
    q_split = mp.sqrt(mp.log(y_min / (y_min + mp.mpf(LEFT_SPLIT * 0.997) ** 2), 2))
    q = nodes(float(q_split), LEFT_LIMIT)
    y = [y_min * mp.mpf(2) ** (-p * p) for p in q]
    x = [invert(gelu, p, mp.mpf(-40), x_min, False) for p in y]
    for _ in range(2):
        add(2.0, q, y, [derivative(p) for p in x])
    return table


def fit_log2() -> list[float]:
    """log2(1 + f) = f P(f) for 1 + f in [sqrt(1/2), sqrt(2)]."""
    f = nodes(float(mp.sqrt(0.5)) - 1, float(mp.sqrt(2)) - 1)
    return [float(c) for c in least_squares(f, [mp.log(1 + p, 2) / p for p in f], [abs(p) for p in f], 8)]


def fit_erf_tail() -> list[float]:
    """h(a) = exp(-a^2 / 2) P(1 / a^2) for a >= 3, erf form."""
    z = nodes(0.0, 1 / 9)
    value = [p ** mp.mpf(-0.5) * mp.exp(1 / (2 * p)) * mp.ncdf(-1 / mp.sqrt(p)) for p in z]
    return [float(c) for c in least_squares(z, value, [1 / v for v in value], 6)]


def float_above(x: float) -> float:
    """The smallest float32 that is not below `x`: comparing a float32 with it is comparing with `x`."""
    nearest = np.float32(x)
    return float(nearest if float(nearest) >= x else np.nextafter(nearest, np.float32(np.inf)))


def literal(value: float) -> str:
    return f"{float(np.float32(value))!r}f"


def header() -> str:
    lines = [
        "// Written by csrc/gelu/fit_tables.py: do not edit by hand.",
        "#pragma once",
        "",
        "namespace tempo {",
        "",
        "// Member k of c multiplies the k-th power; see fit_tables.py for the pieces.",
        "struct GeluTables {",
        "  float x_min, y_min_high, y_min_low, log2_depth;",
        f"  float forward_center[{NUM_PIECES}], forward_constant[{NUM_PIECES}], forward_constant_low[{NUM_PIECES}];",
        f"  float forward_c[{DEGREE}][{NUM_PIECES}];  // powers 1 to {DEGREE}",
        f"  float derivative_c[{DEGREE + 1}][{NUM_PIECES}];",
        f"  float backward_center[{NUM_PIECES}], backward_c[{DEGREE + 1}][{NUM_PIECES}];",
        "};",
        "",
    ]
    for name, (gelu, derivative) in {"kErf": erf_form(), "kTanh": tanh_form()}.items():
        x_min = mp.findroot(derivative, -0.75)
        y_min = gelu(x_min)
        y_high = float(np.float32(float(y_min)))
        forward = fit_forward(gelu, float(-x_min))
        backward = fit_backward(gelu, derivative, x_min)
        scalars = (float_above(float(x_min)), y_high, float(y_min - mp.mpf(y_high)), float(mp.log(-y_min, 2)))
        rows = [forward[k] for k in ("center", "constant", "constant_low")]
        lines.append(f"constexpr GeluTables {name}Tables = {{")
        lines.append("    " + ", ".join(literal(v) for v in scalars) + ",")
        lines += ["    {" + ", ".join(literal(v) for v in row) + "}," for row in rows]
        lines.append("    {")
        lines += ["        {" + ", ".join(literal(v) for v in forward[f"c{k}"]) + "}," for k in range(1, DEGREE + 1)]
        lines += ["    },", "    {"]
        from_input = fit_derivative(derivative, forward["center"])
        lines += ["        {" + ", ".join(literal(v) for v in row) + "}," for row in from_input]
        lines.append("    },")
        lines.append("    {" + ", ".join(literal(v) for v in backward["center"]) + "},")
        lines.append("    {")
        lines += ["        {" + ", ".join(literal(v) for v in backward[f"c{k}"]) + "}," for k in range(DEGREE + 1)]
        lines += ["    },", "};", ""]
    for name, values in (("kLog2", fit_log2()), ("kErfTail", fit_erf_tail())):
        lines.append(f"constexpr float {name}[{len(values)}] = {{{', '.join(literal(v) for v in values)}}};")
    lines += [
        f"constexpr float kForwardWidth = {literal(FORWARD_WIDTH)};",
        f"constexpr float kRightWidth = {literal(RIGHT_WIDTH)}, kRightEnd = {literal(RIGHT_END)};",
        f"constexpr float kLeftSplit = {literal(LEFT_SPLIT)}, kLeftLimit = {literal(LEFT_LIMIT)};",
        "",
        "}  // namespace tempo",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    text = header()
    if "--print" in sys.argv[1:]:
        print(text, end="")
    else:
        Path(__file__).with_name("gelu_tables.h").write_text(text)
