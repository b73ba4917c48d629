"""Every op of torch.ops.tempo with arguments of any size, dtype and device, and the way to run and compare it.

Legend: R rows, H columns; the first dimension is the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import tempo
from tempo.layer_norm import exact_columns

EPS, SITE, SCALE = 1e-12, 5, 0.125
ops = torch.ops.tempo
Arguments = tuple[Any, ...]
Make = Callable[[tuple[int, int], torch.dtype, torch.device], Arguments]


@dataclass(frozen=True)
class OpCase:
    """An op and a way to make its arguments from (R, H), a dtype and a device.

    Attributes:
        exact_integers: whether integer results equal the reference's bit for bit (a place among GELU's 3 extra bits may be
            one off).
        dense: arguments that the op takes contiguous only.
    """

    op: str
    variant: str
    make: Make
    exact_integers: bool = True
    dense: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.op}-{self.variant}" if self.variant else self.op


# ---- arguments: made on the CPU from a fixed seed, so that every device gets the same ----


def _randn(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype).to(device)


def _parameters(columns: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    weight = torch.rand(columns, generator=generator) * 1.9 + 0.1
    weight[: min(columns // 50, 8)] = 0.0
    return weight.to(dtype).to(device), (torch.randn(columns, generator=generator) * 0.1).to(dtype).to(device)


def _rng(device: torch.device) -> Tensor:
    return tempo.make_rng(-(2**40) - 11, 10**10 + 3, device)


def _gelu_forward(approximate: str, bits: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Arguments:
    return _randn(shape, dtype, device, 1, 2.0), approximate, bits


def _gelu_backward(approximate: str, bits: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Arguments:
    y, side = ops.reference_gelu_forward(_randn(shape, dtype, device, 1, 2.0), approximate, bits)
    return _randn(shape, dtype, device, 2), y, side, approximate, bits


def _gelu_recompute(approximate: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Arguments:
    return _randn(shape, dtype, device, 2), _randn(shape, dtype, device, 1, 2.0), approximate


def _dropout(p: float, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Arguments:
    return _randn(shape, dtype, device, 1), p, _rng(device), SITE


def _exact_columns(wide: bool, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Arguments:
    return *_parameters(shape[1], torch.float32 if wide else dtype, device), 16.0 * torch.finfo(dtype).tiny, False


def _layer_norm_forward(wide: bool, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Arguments:
    weight, bias = _parameters(shape[1], torch.float32 if wide else dtype, device)
    # One column has no variance: BERT's eps would multiply rounding errors by a million.
    eps = 1.0 if shape[1] == 1 else EPS
    return _randn(shape, dtype, device, 1, 3.0) + 0.5, weight, bias, eps, exact_columns(weight, bias, dtype)


def _layer_norm_backward(wide: bool, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Arguments:
    x, weight, bias, eps, columns = _layer_norm_forward(wide, shape, dtype, device)
    y, rstd, exact = ops.reference_layer_norm_forward(x, weight, bias, eps, columns)
    return _randn(shape, dtype, device, 2), y, rstd, weight, bias, columns, exact


def _chain_forward(p: float, wide: bool, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Arguments:
    x, weight, bias, eps, columns = _layer_norm_forward(wide, shape, dtype, device)
    x_bias, residual = _randn(shape[1:], weight.dtype, device, 4), _randn(shape, dtype, device, 5)
    return x, x_bias, residual, weight, bias, eps, columns, p, _rng(device), SITE


def _chain_backward(p: float, wide: bool, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Arguments:
    arguments = _chain_forward(p, wide, shape, dtype, device)
    y, rstd, exact = ops.reference_dropout_add_layer_norm_forward(*arguments)
    weight, bias, columns = arguments[3], arguments[4], arguments[6]
    return _randn(shape, dtype, device, 2), y, rstd, weight, bias, columns, exact, p, _rng(device), SITE


def _scores_shape(shape: tuple[int, int]) -> tuple[int, int, int, int]:
    """[batch, heads, queries, keys] with about R rows."""
    return 2, 2, max(1, shape[0] // 4), shape[1]


def _softmax_forward(
    p: float, masked: str, causal: bool, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Arguments:
    full = _scores_shape(shape)
    keep = torch.rand((full[0], 1, 1, full[3]), generator=torch.Generator().manual_seed(6)) < 0.7
    keep[0] = False  # a sample with nothing to attend to
    added = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(dtype).min).to(dtype)
    mask = {"": None, "bool": keep.to(device), "added": added.to(device)}[masked]
    return _randn(full, dtype, device, 1, 10.0), mask, SCALE, p, _rng(device), SITE, causal


def _softmax_backward(p: float, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Arguments:
    full = _scores_shape(shape)
    probabilities = torch.softmax(_randn(full, torch.float32, device, 1), -1).to(dtype)
    return _randn(full, dtype, device, 2), probabilities, SCALE, p, _rng(device), SITE


def _lamb(
    grad_norm: float, settings: tuple[Any, ...], shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Arguments:
    """Three tensors in float32, gradients and (16-bit) copies in `dtype`, after a few steps."""
    shapes = [shape, shape[1:], (1,)]
    params, exp_avgs, exp_avg_sqs = (
        [_randn(s, torch.float32, device, seed + i) for i, s in enumerate(shapes)] for seed in (1, 10, 20)
    )
    copies = [] if dtype == torch.float32 else [p.to(dtype) for p in params]
    grads = [_randn(s, dtype, device, 30 + i) for i, s in enumerate(shapes)]
    step, norm = torch.tensor([4], device=device), torch.tensor(grad_norm, device=device)
    found_inf = torch.zeros(1, device=device)
    return params, grads, exp_avgs, [v.abs() for v in exp_avg_sqs], copies, step, norm, found_inf, *settings


# ---- the cases ----


def _gelu_cases() -> list[OpCase]:
    cases = []
    for form in ("none", "tanh"):
        for bits in (1, 4):
            name, exact = f"{form}-{bits}", bits == 1
            cases += [OpCase(op, name, partial(_gelu_forward, form, bits), exact) for op in ("gelu_forward", "gelu_forward_")]
            cases.append(OpCase("gelu_backward", name, partial(_gelu_backward, form, bits), dense=("side",)))
        recompute = partial(_gelu_recompute, form)
        cases += [OpCase(op, form, recompute) for op in ("gelu_recompute_backward", "gelu_recompute_backward_")]
    return cases


def _layer_norm_cases() -> list[OpCase]:
    cases = []
    for wide in (False, True):
        name = "float32" if wide else "same"
        cases.append(OpCase("layer_norm_exact_columns", name, partial(_exact_columns, wide)))
        cases.append(OpCase("layer_norm_forward", name, partial(_layer_norm_forward, wide)))
        cases.append(OpCase("layer_norm_backward", name, partial(_layer_norm_backward, wide), dense=("rstd",)))
        for p in (0.0, 0.1, 1.0):
            forward, backward = partial(_chain_forward, p, wide), partial(_chain_backward, p, wide)
            cases.append(OpCase("dropout_add_layer_norm_forward", f"{name}-p{p:g}", forward))
            cases.append(OpCase("dropout_add_layer_norm_backward", f"{name}-p{p:g}", backward, dense=("rstd",)))
    return cases


def _dropout_cases() -> list[OpCase]:
    cases = [OpCase("dropout", f"p{p:g}", partial(_dropout, p)) for p in (0.0, 0.1, 0.5, 1.0)]
    for p in (0.0, 0.1, 1.0):
        cases.append(OpCase("softmax_dropout_forward", f"p{p:g}", partial(_softmax_forward, p, "bool", False)))
        cases.append(OpCase("softmax_dropout_backward", f"p{p:g}", partial(_softmax_backward, p)))
    for masked, causal in (("", False), ("added", False), ("", True)):
        name = masked or ("causal" if causal else "unmasked")
        cases.append(OpCase("softmax_dropout_forward", name, partial(_softmax_forward, 0.1, masked, causal)))
    return cases


def _lamb_cases() -> list[OpCase]:
    # lr, beta1, beta2, eps, weight_decay, max_grad_norm, use_trust_ratio, bias_correction
    with_ratio = (0.01, 0.9, 0.999, 1e-6, 0.01, 1.0, True, True)
    without = (0.01, 0.9, 0.999, 1e-6, 0.0, 0.0, False, False)
    variants = {"clipped": (7.0, with_ratio), "plain": (0.5, without), "overflow": (float("inf"), with_ratio)}
    return [OpCase("lamb_step_", name, partial(_lamb, *arguments)) for name, arguments in variants.items()]


CASES = [*_gelu_cases(), *_layer_norm_cases(), *_dropout_cases(), *_lamb_cases()]


# ---- running and comparing ----


def relaid(t: Tensor, layout: str) -> Tensor:
    """A fresh copy of `t` in another layout: contiguous, strided, transposed or unaligned (no pointer a multiple of 16)."""
    if layout == "strided":
        copy = t.new_empty((*t.shape, 2))[..., 1]
    elif layout == "transposed" and t.dim() >= 2:
        copy = t.new_empty((*t.shape[:-2], t.shape[-1], t.shape[-2])).transpose(-1, -2)
    elif layout == "unaligned":
        copy = t.new_empty(t.numel() + 1)[1:].view(t.shape)
    else:
        copy = torch.empty_like(t, memory_format=torch.contiguous_format)
    return copy.copy_(t)


def run(op: str, arguments: Arguments, layout: str = "contiguous", dense: tuple[str, ...] = ()) -> list[Tensor]:
    """Run the op on copies of its tensors and return what it returned and what it wrote over."""
    function = getattr(ops, op)
    schema = function.default._schema.arguments

    def copied(value: Any, name: str) -> Any:
        if isinstance(value, list | tuple):
            return [copied(item, name) for item in value]
        if not isinstance(value, Tensor):
            return value
        return relaid(value, layout if value.is_floating_point() and name not in dense else "contiguous")

    copies = [copied(value, argument.name) for value, argument in zip(arguments, schema, strict=True)]
    returned = function(*copies)
    written = [
        copy
        for copy, argument in zip(copies, schema, strict=True)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [result for result in flat((returned, written)) if isinstance(result, Tensor)]


def flat(values: Any) -> list[Any]:
    if isinstance(values, list | tuple):
        return [item for value in values for item in flat(value)]
    return [values]


def mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The arguments with `function` of each tensor in its place."""
    if isinstance(value, list | tuple):
        return type(value)(mapped(function, item) for item in value)
    return function(value) if isinstance(value, Tensor) else value


def moved(value: Any, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Any:
    """The arguments with their floating tensors in `dtype` and all tensors on `device`."""
    return mapped(lambda t: t.to(device=device, dtype=dtype if t.is_floating_point() else None), value)
