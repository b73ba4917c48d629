"""GELU that keeps its output instead of its input (Tempo paper, section on in-place GELU).

GELU falls to its minimum y_min at x_min and rises after it, so y alone leaves two candidates for x; one bit per element,
side = not (x < x_min), says which. The derivative is then a function of y. Near the minimum it behaves like
sqrt(y - y_min), so it is evaluated in t = sqrt(y - y_min) (far left: q = sqrt(log2(y_min / y))); the coefficients come from
csrc/gelu/fit_gelu.py. "low" pieces serve 16-bit outputs, "high" pieces float32; float64 inverts GELU by bisection.

A 16-bit y has lost where inside its rounding cell the true value lay, which near the minimum costs most of the error of the
gradient. side_bits = 4 keeps three more bits: the place of t inside the cell, in eighths.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tempo._library import define
from tempo.gelu_coefficients import COEFFICIENTS

_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715
# Bits of the significand, the hidden one included: a value m * 2^e with 0.5 <= m < 1 has the spacing 2^(e - bits).
_SIGNIFICAND_BITS = {torch.bfloat16: 8, torch.float16: 11}
_SMALLEST_SPACING = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}
_LEVELS = 8


def _gelu(x: Tensor, approximate: str) -> Tensor:
    if approximate == "tanh":
        return x * torch.sigmoid(2.0 * _SQRT_2_OVER_PI * (x + _CUBIC * x * x * x))
    return 0.5 * x * torch.erfc(-x * _SQRT_HALF)


def _derivative_at_x(x: Tensor, approximate: str) -> Tensor:
    if approximate == "tanh":
        s = torch.sigmoid(2.0 * _SQRT_2_OVER_PI * (x + _CUBIC * x * x * x))
        return s + x * 2.0 * _SQRT_2_OVER_PI * (1.0 + 3.0 * _CUBIC * x * x) * s * (1.0 - s)
    return 0.5 * torch.erfc(-x * _SQRT_HALF) + x * torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


# ---- the side bits: element i is bit i % 8 of byte i // 8, or the low (i even) or high nibble of byte i // 2 ----


def _pack(values: Tensor, bits: int) -> Tensor:
    per_byte = 8 // bits
    flat = values.reshape(-1).to(torch.uint8)
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % per_byte)).view(-1, per_byte)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=values.device)
    # The fields do not overlap, so their sum is their union.
    return (padded << shifts).sum(1, dtype=torch.uint8)


def _unpack(packed: Tensor, bits: int, shape: torch.Size) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    fields = (packed[:, None] >> shifts) & ((1 << bits) - 1)
    return fields.view(-1)[: math.prod(shape)].view(shape)


def _depth(y: Tensor, c: dict) -> Tensor:
    """y - y_min for float32 y: y_min as the sum of two float32 numbers, so that the difference is exact near it."""
    return ((y - c["y_min_high"]) - c["y_min_low"]).clamp(min=0.0)


def _cell_in_t(y: Tensor, dtype: torch.dtype, c: dict) -> tuple[Tensor, Tensor]:
    """The ends, in t, of the interval of true values that round to `y` (float32 copy of a value of the 16-bit `dtype`)."""
    _, exponent = torch.frexp(y)
    spacing = torch.exp2((exponent - _SIGNIFICAND_BITS[dtype]).float()).clamp(min=_SMALLEST_SPACING[dtype])
    return _depth(y - 0.5 * spacing, c).sqrt(), _depth(y + 0.5 * spacing, c).sqrt()


def _place_in_cell(exact: Tensor, y: Tensor, c: dict) -> Tensor:
    """Which eighth of the cell, in t, holds the unrounded value; uint8 0..7."""
    low, high = _cell_in_t(y.float(), y.dtype, c)
    t = _depth(exact, c).sqrt()
    place = (t - low) / (high - low).clamp(min=1e-30) * _LEVELS
    return place.nan_to_num(0.0).clamp(0, _LEVELS - 1).to(torch.uint8)


def _refine(y: Tensor, place: Tensor, dtype: torch.dtype, c: dict) -> Tensor:
    """The y, in float32, at the middle of the eighth that `place` names."""
    low, high = _cell_in_t(y, dtype, c)
    t = low + (place.float() + 0.5) / _LEVELS * (high - low)
    refined = c["y_min_high"] + (t * t + c["y_min_low"])
    # Where y is not finite or huge the cell has no width that matters.
    return torch.where(torch.isfinite(refined) & (y.abs() < 8.0), refined, y)


# ---- forward ----


def _forward(x: Tensor, approximate: str, side_bits: int) -> tuple[Tensor, Tensor]:
    c = COEFFICIENTS[approximate]
    # float32 is computed in float64: y must be right to about half a unit in the last place near the minimum.
    wide = x.to(torch.float32 if x.element_size() == 2 else torch.float64)
    exact = _gelu(wide, approximate)
    # x = -inf gives 0 * -inf; the limit is -0.
    exact = torch.where(wide == -math.inf, torch.full_like(exact, -0.0), exact)
    y = exact.to(x.dtype)
    side = ~(wide < c["x_min"])
    if side_bits == 1:
        return y, _pack(side, 1)
    fields = side.to(torch.uint8) << 3
    if x.element_size() == 2:
        fields = fields | _place_in_cell(exact, y, c)
    return y, _pack(fields, 4)


def _forward_inplace(x: Tensor, approximate: str, side_bits: int) -> Tensor:
    y, side = _forward(x, approximate, side_bits)
    x.copy_(y)
    return side


# ---- backward ----


def _horner(coefficients: list[float], t: Tensor) -> Tensor:
    result = torch.full_like(t, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result.mul_(t).add_(coefficient)
    return result


def _shifted(piece: dict, t: Tensor) -> Tensor:
    return _horner(piece["polynomial"], t - piece["center"])


def _left_distance(y: Tensor, c: dict, limit: float) -> Tensor:
    """q = sqrt(log2(y_min / y)), clamped at `limit`, past which the derivative is below float32's reach."""
    return (c["log2_depth"] - torch.log2(-y)).clamp(0.0, limit * limit).sqrt()


def _derivative_low(y: Tensor, side: Tensor, c: dict) -> Tensor:
    right, left = c["low_right"], c["low_left"]
    t = _depth(y, c).sqrt().clamp(max=3.0)
    gauss = torch.exp2(-(right["beta_log2e"] * y) * y)
    on_right = 1.0 + gauss * (right["k"] + _shifted(right, t) * t)
    q = _left_distance(y, c, 4.8)
    on_left = torch.where(y < 0, _shifted(left, q) * q * y, torch.zeros_like(y))
    return torch.where(side, on_right, on_left)


def _derivative_high(y: Tensor, side: Tensor, c: dict) -> Tensor:
    t = _depth(y, c).sqrt()
    far = c["high_right_far"]
    gauss = torch.exp2(-(far["beta_log2e"] * y) * y)
    far_right = 1.0 + gauss * _shifted(far, t.clamp(max=3.0))
    # The near pieces are clamped to their range: outside it an unused branch must not overflow to NaN.
    on_right = torch.where(t <= 1.2, _shifted(c["high_right_near"], t.clamp(max=1.2)) * t, far_right)
    q = _left_distance(y, c, 5.0)
    far_left = torch.where(y < 0, _shifted(c["high_left_far"], q) * y, torch.zeros_like(y))
    on_left = torch.where(t <= 0.28, -_shifted(c["high_left_near"], t.clamp(max=0.28)) * t, far_left)
    return torch.where(side, on_right, on_left)


def _derivative_float64(y: Tensor, side: Tensor, approximate: str) -> Tensor:
    """Invert GELU on the known side by bisection; gradcheck's path, not a fast one."""
    x_min = COEFFICIENTS[approximate]["x_min"]
    low = torch.where(side, x_min, -40.0).to(y)
    high = torch.where(side, y.abs() + 1.0, x_min).to(y)
    for _ in range(70):
        middle = 0.5 * (low + high)
        go_right = (_gelu(middle, approximate) < y) == side
        low, high = torch.where(go_right, middle, low), torch.where(go_right, high, middle)
    return _derivative_at_x(0.5 * (low + high), approximate)


def _derivative(y: Tensor, packed: Tensor, approximate: str, side_bits: int) -> Tensor:
    c = COEFFICIENTS[approximate]
    fields = _unpack(packed, side_bits, y.shape)
    side = (fields >> (side_bits - 1)).bool()
    if y.dtype == torch.float64:
        result = _derivative_float64(y, side, approximate)
    elif y.dtype == torch.float32:
        result = _derivative_high(y, side, c)
    else:
        wide = y.float()
        if side_bits == 4:
            wide = _refine(wide, fields & (_LEVELS - 1), y.dtype, c)
        result = _derivative_low(wide, side, c)
    # An infinite y is on the straight part; NaN stays NaN.
    result = torch.where(y == math.inf, torch.ones_like(result), result)
    return torch.where(torch.isnan(y), y.to(result.dtype), result)


def _backward(grad: Tensor, y: Tensor, side: Tensor, approximate: str, side_bits: int) -> Tensor:
    return (grad * _derivative(y, side, approximate, side_bits)).to(grad.dtype)


def _recompute_backward(grad: Tensor, x: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """(dx, y) from x itself: exact, for layers that keep their input."""
    wide = x.to(torch.float32 if x.element_size() == 2 else torch.float64)
    derivative = _derivative_at_x(wide, approximate)
    # Far out, 0 times infinity must not appear.
    derivative = torch.where(wide.abs() > 40.0, (wide > 0).to(wide.dtype), derivative)
    return (grad * derivative).to(grad.dtype), _forward(x, approximate, 1)[0]


def _recompute_backward_inplace(grad: Tensor, x: Tensor, approximate: str) -> None:
    dx, y = _recompute_backward(grad, x, approximate)
    grad.copy_(dx)
    x.copy_(y)


def _side_bytes(x: Tensor, side_bits: int) -> Any:
    return (x.numel() * side_bits + 7) // 8


def _empty_side(x: Tensor, approximate: str, side_bits: int) -> Tensor:
    return x.new_empty(_side_bytes(x, side_bits), dtype=torch.uint8)


define(
    "gelu_forward(Tensor x, str approximate, int side_bits) -> (Tensor, Tensor)",
    _forward,
    lambda x, approximate, side_bits: (torch.empty_like(x), _empty_side(x, approximate, side_bits)),
)
define("gelu_forward_(Tensor(a!) x, str approximate, int side_bits) -> Tensor", _forward_inplace, _empty_side)
define(
    "gelu_backward(Tensor grad, Tensor y, Tensor side, str approximate, int side_bits) -> Tensor",
    _backward,
    lambda grad, y, side, approximate, side_bits: torch.empty_like(grad),
)
define(
    "gelu_recompute_backward(Tensor grad, Tensor x, str approximate) -> (Tensor, Tensor)",
    _recompute_backward,
    lambda grad, x, approximate: (torch.empty_like(grad), torch.empty_like(x)),
)
define(
    "gelu_recompute_backward_(Tensor(a!) grad, Tensor(b!) x, str approximate) -> ()",
    _recompute_backward_inplace,
    lambda grad, x, approximate: None,
)


def _overlaps_itself(x: Tensor) -> bool:
    """Whether two elements of `x` may share memory, as those of an expanded tensor do."""
    if x.is_contiguous():
        return False
    reach = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride < reach:
            return True
        reach += stride * (size - 1)
    return False


def _why_not_inplace(x: Tensor) -> str | None:
    """What forbids to write over `x`, looked at before it is written; None where nothing does."""
    if x.requires_grad and torch.is_grad_enabled():
        if x.is_leaf:
            return "a leaf tensor that requires a gradient"
        base = None if torch.compiler.is_compiling() else x._base
        if base is not None and base.is_leaf and base.requires_grad:
            return "a view of a leaf tensor that requires a gradient"
    if not torch.compiler.is_compiling() and _overlaps_itself(x):
        return "a tensor whose elements share memory (an expanded one, for example)"
    return None


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str, side_bits: int, inplace: bool) -> Tensor:
        if inplace:
            side = torch.ops.tempo.gelu_forward_(x, approximate, side_bits)
            ctx.mark_dirty(x)
            y = x
        else:
            y, side = torch.ops.tempo.gelu_forward(x, approximate, side_bits)
        ctx.save_for_backward(y, side)
        ctx.approximate, ctx.side_bits = approximate, side_bits
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        y, side = ctx.saved_tensors
        return torch.ops.tempo.gelu_backward(grad, y, side, ctx.approximate, ctx.side_bits), None, None, None


def gelu(x: Tensor, approximate: str = "none", side_bits: int = 1, inplace: bool = False) -> Tensor:
    """GELU whose backward pass needs its output and one bit (or four) per element, not its input.

    Args:
        x: any shape, floating dtype.
        approximate: "none" for x * Phi(x), "tanh" for the tanh form, as in `torch.nn.functional.gelu`.
        side_bits: 1 keeps which side of the minimum x lay on; 4 keeps three more bits, which makes a 16-bit gradient as
            accurate as one from x.
        inplace: write the result over `x` and return `x`. Autograd refuses (at the backward pass) if an earlier operation
            needed `x`.

    Returns:
        The shape and dtype of `x`.

    Raises:
        ValueError: an unknown `approximate` or `side_bits`, an `x` that is not floating, or `inplace` on a leaf that requires
            a gradient, on a view of one, or on a tensor whose elements share memory.
    """
    if approximate not in COEFFICIENTS:
        raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    if side_bits not in (1, 4):
        raise ValueError(f"side_bits must be 1 or 4, got {side_bits}")
    if not x.is_floating_point():
        raise ValueError(f"gelu needs a floating-point tensor, got {x.dtype}")
    if not inplace:
        return _Gelu.apply(x, approximate, side_bits, False)
    forbidden = _why_not_inplace(x)
    if forbidden:
        raise ValueError(f"inplace=True would overwrite {forbidden}; use inplace=False")
    if torch.compiler.is_compiling():
        # An in-place autograd.Function is not traced faithfully (PyTorch issue 184113). A copy into x is, and the compiler
        # drops it where nothing else sees x.
        x.copy_(_Gelu.apply(x, approximate, side_bits, False))
        return x
    return _Gelu.apply(x, approximate, side_bits, True)


class InplaceGelu(nn.Module):
    """In-place GELU as a module; a drop-in for `nn.GELU` where nothing else needs the input.

    Args: as for `gelu`.
    """

    def __init__(self, approximate: str = "none", side_bits: int = 1, inplace: bool = True) -> None:
        super().__init__()
        self.approximate, self.side_bits, self.inplace = approximate, side_bits, inplace

    def forward(self, x: Tensor) -> Tensor:
        # As a drop-in, the module writes elsewhere where x must not be overwritten.
        return gelu(x, self.approximate, self.side_bits, self.inplace and _why_not_inplace(x) is None)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}, side_bits={self.side_bits}, inplace={self.inplace}"
