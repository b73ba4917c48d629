"""Fit the tables of the CPU's GELU in bfloat16 and write csrc/gelu/gelu_bfloat16_tables.h.

    python csrc/gelu/fit_bfloat16.py            # writes the header
    python csrc/gelu/fit_bfloat16.py --print    # prints it

bfloat16 rounds to 8 bits, so that polynomials of lower degree than those of fit_tables.py do; an error of 1e-4 of the result is
a twentieth of the rounding. All pieces lie about multiples of 1/2, which one addition rounds to. Needs numpy and mpmath.

Forward. GELU(x) = max(x, 0) - a P(a) with a = |x|, P(a) = -GELU(-a) / a, relative error below 1e-5 for a <= 3.75. Right of that
a P(a) is less than half a unit of x and may stay as it is at 3.75. GELU'(-a) on the same pieces.

Backward. One variable v for both sides. Right of the minimum v = t = sqrt(y - y_min), GELU' = t P(v): pieces 0 to 5, as far as
RIGHT_END. Left of it q = sqrt(log2(y_min / y)), v = LEFT_START + LEFT_SCALE q, GELU' = q y P(v): pieces 6 and 7.

Cells. With 4 side bits the kernel finds an eighth, evenly in t, of the cell of values that round to y. Only in the cells next to
the minimum is that not an eighth of the cell itself; they are one spacing apart and have tables.
"""

from __future__ import annotations

import sys
from pathlib import Path

import mpmath as mp
import numpy as np
from fit_tables import NUM_PIECES, Function, erf_form, invert, least_squares, literal, nodes, tanh_form

FORWARD_DEGREE = 5
BACKWARD_DEGREE = 4
LOG2_DEGREE = 2
RIGHT_END = 2.6
LEFT_END = 4.9  # y = y_min 2^-24
LEFT_SPLIT = 1.5
LEFT_SCALE = 0.4995 / (LEFT_END - LEFT_SPLIT)  # an approximate root still stays below 3.75, where piece 0 would come
LEFT_START = 3.25 - LEFT_SCALE * LEFT_SPLIT
SPACING = 2.0**-10  # of bfloat16 next to the minimum


def by_power(pieces: list[np.ndarray]) -> list[list[float]]:
    return [[float(c) for c in column] for column in zip(*pieces, strict=True)]


def fit_forward(gelu: Function, derivative: Function) -> tuple[list[list[float]], list[list[float]]]:
    """Coefficients, by power and piece, of -GELU(-a) / a and of GELU'(-a)."""
    values, slopes = [], []
    for center in np.arange(NUM_PIECES) / 2:
        a = nodes(max(0.0, center - 0.25), center + 0.25)
        u = [p - mp.mpf(center) for p in a]
        value, slope = [-gelu(-p) / p for p in a], [derivative(-p) for p in a]
        values.append(least_squares(u, value, [1 / v for v in value], FORWARD_DEGREE))
        slopes.append(least_squares(u, slope, [1 / (abs(v) + mp.mpf("0.01")) for v in slope], FORWARD_DEGREE))
    return by_power(values), by_power(slopes)


def fit_backward(gelu: Function, derivative: Function, x_min: mp.mpf) -> list[list[float]]:
    """Coefficients, by power and piece, of GELU' / t and of GELU' / (q y) in v."""
    y_min = gelu(x_min)
    pieces = []
    for center in (0.0, 0.5, 1.0, 1.5, 2.0, 2.5):
        t = nodes(max(0.0, center - 0.25), min(center + 0.25, RIGHT_END))
        x = [invert(gelu, y_min + p * p, x_min, mp.mpf(20), True) for p in t]
        ratio = [derivative(at) / p for at, p in zip(x, t, strict=True)]
        pieces.append(least_squares([p - mp.mpf(center) for p in t], ratio, t, BACKWARD_DEGREE))
    for center, low, high in ((3.0, 0.0, LEFT_SPLIT), (3.5, LEFT_SPLIT, LEFT_END)):
        q = nodes(low, high)
        y = [y_min * mp.mpf(2) ** (-p * p) for p in q]
        x = [invert(gelu, p, mp.mpf(-40), x_min, False) for p in y]
        ratio = [derivative(at) / (p * value) for at, p, value in zip(x, q, y, strict=True)]
        u = [LEFT_START + LEFT_SCALE * p - mp.mpf(center) for p in q]
        pieces.append(least_squares(u, ratio, [1 / v for v in ratio], BACKWARD_DEGREE))
    return by_power(pieces)


def fit_log2() -> list[float]:
    """log2(m) = 1 + f P(f), f = m - 2, for m in [1, 2): exact, and with heavy weights, at the end that y_min belongs to."""
    f = nodes(-1.0, 0.0)
    ratio = [(mp.log(2 + p, 2) - 1) / p for p in f]
    return [float(c) for c in least_squares(f, ratio, [mp.sqrt(abs(p)) for p in f], LOG2_DEGREE)]


def cells(y_min: mp.mpf) -> tuple[float, list[list[float]]]:
    """The lowest value of bfloat16, and by cell: low end and 8 / width in t, width^2, and what of the cell is below y_min.

    The last cell stands for all further ones, where these corrections are 0.
    """
    lowest = mp.nint(y_min / SPACING) * SPACING
    rows = []
    for cell in range(NUM_PIECES - 1):
        low, high = (lowest + (cell + side) * mp.mpf(SPACING) - y_min for side in (-0.5, 0.5))
        low_t, high_t = mp.sqrt(max(low, mp.mpf(0))), mp.sqrt(high)
        rows.append([low_t, 8 / (high_t - low_t), (high_t - low_t) ** 2, max(-low, mp.mpf(0))])
    rows.append([mp.mpf(0)] * 4)
    return float(lowest), [[float(v) for v in column] for column in zip(*rows, strict=True)]


def word_below(x: float) -> int:
    """The bits of the largest bfloat16 below the negative number `x`, which is none itself."""
    return (int(np.float32(x).view(np.uint32)) >> 16) + 1


def header() -> str:
    lines = [
        "// Written by csrc/gelu/fit_bfloat16.py, which describes the pieces: do not edit by hand.",
        "#pragma once",
        "#include <stdint.h>",
        "",
        "namespace tempo {",
        "",
        f"constexpr int kLowForwardTerms = {FORWARD_DEGREE + 1}, kLowBackwardTerms = {BACKWARD_DEGREE + 1};",
        "",
        "// Row k multiplies the k-th power.",
        "struct GeluLowTables {",
        "  uint16_t first_left_word;  // the bits of the bfloat16 next below x_min",
        "  float x_min, y_min, inverse_y_min;",
        f"  float forward_c[kLowForwardTerms][{NUM_PIECES}], slope_c[kLowForwardTerms][{NUM_PIECES}];",
        f"  float backward_c[kLowBackwardTerms][{NUM_PIECES}];",
        "  float lowest_cell;",
        f"  float cell_low[{NUM_PIECES}], cell_eighths[{NUM_PIECES}], cell_square[{NUM_PIECES}], cell_missing[{NUM_PIECES}];",
        "};",
        "",
    ]
    for name, (gelu, derivative) in {"kErf": erf_form(), "kTanh": tanh_form()}.items():
        x_min = mp.findroot(derivative, -0.75)
        y_min = gelu(x_min)
        values, slopes = fit_forward(gelu, derivative)
        lowest, rows = cells(y_min)
        scalars = (float(x_min), float(y_min), float(1 / y_min))
        lines.append(f"constexpr GeluLowTables {name}LowTables = {{")
        lines.append(f"    {word_below(float(x_min)):#06x},")
        lines.append("    " + ", ".join(literal(v) for v in scalars) + ",")
        for table in (values, slopes, fit_backward(gelu, derivative, x_min)):
            lines.append("    {")
            lines += ["        {" + ", ".join(literal(v) for v in row) + "}," for row in table]
            lines.append("    },")
        lines.append(f"    {literal(lowest)},")
        lines += ["    {" + ", ".join(literal(v) for v in row) + "}," for row in rows]
        lines += ["};", ""]
    log2 = fit_log2()
    lines += [
        f"constexpr float kLowLog2[{len(log2)}] = {{{', '.join(literal(v) for v in log2)}}};",
        f"constexpr float kLowRightEnd = {literal(RIGHT_END)}, kLowLeftEnd = {literal(LEFT_END)};",
        f"constexpr float kLowLeftStart = {literal(LEFT_START)}, kLowLeftScale = {literal(LEFT_SCALE)};",
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
        Path(__file__).with_name("gelu_bfloat16_tables.h").write_text(text)
