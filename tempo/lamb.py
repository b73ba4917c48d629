"""The LAMB step over many tensors at once (You et al. 2020, as in NVIDIA's BERT recipe).

With g the gradient of a tensor w, G the norm of all gradients together, t counting applied steps from 1:

    g <- g / max(1, G / max_grad_norm)
    m <- b1 m + (1 - b1) g           m_hat = m / (1 - b1^t)
    v <- b2 v + (1 - b2) g^2         v_hat = v / (1 - b2^t)
    u = m_hat / (sqrt(v_hat) + eps) + weight_decay * w
    w <- w - lr * r * u              r = |w| / |u|, 1 where either norm is 0

G must be known before the first element is touched, and r before the first weight is: at least one pass reads g, w, m, v and
writes m, v, and another reads m, v, w and writes w (u is computed again rather than kept); without r one pass does it all.
A kernel makes just these passes.

Where G is not finite or an overflow was found, nothing changes: no moment, weight, copy or step count. The count and the
decision stay on the device, so the host never waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tempo._library import _LIBRARY, define

Tensors = list[Tensor] | tuple[Tensor, ...]


def _new_values(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    new_step: Tensor,
    grad_norm: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    max_grad_norm: float,
    use_trust_ratio: bool,
    bias_correction: bool,
) -> tuple[Tensors, Tensors, Tensors]:
    """What the weights, m and v of a step are, in the moments' dtype."""
    dtype = exp_avgs[0].dtype
    weights = [p.to(dtype) for p in params]
    gradients: Tensors = [g.to(dtype) for g in grads]
    if max_grad_norm > 0:
        gradients = torch._foreach_div(gradients, (grad_norm.to(dtype) / max_grad_norm).clamp(min=1.0))
    new_avgs = torch._foreach_lerp(exp_avgs, gradients, 1.0 - beta1)
    new_sqs = torch._foreach_mul(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(new_sqs, gradients, gradients, 1.0 - beta2)
    denominator, update = new_sqs, new_avgs
    if bias_correction:
        # In float64: 1 - 0.999^t has lost half of its digits in float32 for small t.
        correction_1, correction_2 = ((1.0 - beta ** new_step.double()).to(dtype) for beta in (beta1, beta2))
        denominator, update = torch._foreach_div(new_sqs, correction_2), torch._foreach_div(new_avgs, correction_1)
    denominator = torch._foreach_sqrt(denominator)
    torch._foreach_add_(denominator, eps)
    update = torch._foreach_div(update, denominator)
    if weight_decay != 0:
        torch._foreach_add_(update, weights, alpha=weight_decay)
    if use_trust_ratio:
        torch._foreach_mul_(update, _trust_ratios(weights, update))
    return torch._foreach_add(weights, update, alpha=-lr), new_avgs, new_sqs


def _trust_ratios(weights: Tensors, update: Tensors) -> list[Tensor]:
    weight_norms, update_norms = (torch.stack(torch._foreach_norm(tensors)) for tensors in (weights, update))
    usable = (weight_norms > 0) & (update_norms > 0)
    return list(torch.where(usable, weight_norms / update_norms, torch.ones_like(weight_norms)).unbind())


def reference_lamb_step_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    copies: list[Tensor],
    step: Tensor,
    grad_norm: Tensor,
    found_inf: Tensor | None,
    *settings: Any,
) -> None:
    """The step in PyTorch's own operations; for tensors of any dtype, layout and type (sharded ones too)."""
    applies = torch.isfinite(grad_norm).reshape(step.shape)
    if found_inf is not None:
        applies = applies & ~(found_inf > 0).reshape(step.shape)
    step.add_(applies)
    if not params:
        return
    # Where nothing applies the new values are computed all the same, from a count of at least 1, and not taken.
    scalars = (step.clamp(min=1).reshape(()), grad_norm.reshape(()))
    new = _new_values(params, grads, exp_avgs, exp_avg_sqs, *scalars, *settings)
    taken = applies.reshape(())
    for old_tensors, new_tensors in zip((params, exp_avgs, exp_avg_sqs), new, strict=True):
        for old, value in zip(old_tensors, new_tensors, strict=True):
            old.copy_(torch.where(taken, value.to(old.dtype), old))
    for copy, p in zip(copies, params, strict=bool(copies)):
        copy.copy_(torch.where(taken, p.to(copy.dtype), copy))


def _fake(*arguments: Any) -> None:
    return None


define(
    "lamb_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] copies,"
    " Tensor(e!) step, Tensor grad_norm, Tensor? found_inf, float lr, float beta1, float beta2, float eps, float weight_decay,"
    " float max_grad_norm, bool use_trust_ratio, bool bias_correction) -> ()",
    reference_lamb_step_,
    _fake,
)


def _count_as_written(keyset: Any, *arguments: Any) -> None:
    """Tell autograd what is written over, as PyTorch's own in-place ops do, and go on to the device's kernel."""
    params, _, exp_avgs, exp_avg_sqs, copies, step = arguments[:6]
    increment_version([*params, *exp_avgs, *exp_avg_sqs, *copies, step])
    below = keyset & torch._C._after_ADInplaceOrView_keyset
    torch.ops.tempo.lamb_step_.default.redispatch(below, *arguments)


_LIBRARY.impl("lamb_step_", _count_as_written, "ADInplaceOrView", with_keyset=True)


def _check(lists: dict[str, list[Tensor]], scalars: dict[str, Tensor | None]) -> None:
    params = lists["params"]
    for name, tensors in lists.items():
        if name == "copies" and not tensors:
            continue
        if [t.shape for t in tensors] != [p.shape for p in params]:
            raise ValueError(f"{name} must have the shapes of params, got {len(tensors)} tensors for {len(params)} parameters")
    for name, scalar in scalars.items():
        if scalar is not None and scalar.numel() != 1:
            raise ValueError(f"{name} must have one element, got shape {tuple(scalar.shape)}")
    if scalars["step"] is not None and scalars["step"].dtype != torch.int64:
        raise ValueError(f"step must be int64, got {scalars['step'].dtype}")


def lamb_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    step: Tensor,
    grad_norm: Tensor,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    max_grad_norm: float = 1.0,
    use_trust_ratio: bool = True,
    bias_correction: bool = True,
    copies: Sequence[Tensor] = (),
    found_inf: Tensor | None = None,
) -> None:
    """Update the parameters of a group in place; nothing at all where `grad_norm` is not finite or `found_inf` is not 0.

    Args:
        params: weights, of any shapes; float32 for the kernels, any floating dtype for the reference.
        grads: their gradients, unscaled and not clipped; a kernel on a GPU takes 16-bit ones too.
        exp_avgs: m, of the parameters' shapes; its dtype, float32 as a rule, is that of the arithmetic.
        exp_avg_sqs: v, likewise.
        step: int64, one element: the applied steps so far; one more afterwards.
        grad_norm: one element: the L2 norm of all gradients of all groups.
        lr: learning rate.
        beta1: decay of m.
        beta2: decay of v.
        eps: added to sqrt(v_hat).
        weight_decay: of this group.
        max_grad_norm: gradients are divided by max(1, grad_norm / max_grad_norm); 0 does not clip.
        use_trust_ratio: scale each tensor's update by |w| / |u|.
        bias_correction: divide m and v by 1 - beta^t.
        copies: nothing, or a 16-bit tensor for each parameter, which gets the new weights rounded.
        found_inf: one element, more than 0 where a gradient is infinite or NaN (GradScaler's).

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "copies": copies}
    given = {name: list(tensors) for name, tensors in lists.items()}
    _check(given, {"step": step, "grad_norm": grad_norm, "found_inf": found_inf})
    is_plain = all(type(p) in (Tensor, torch.nn.Parameter) for p in params)
    # Sharded parameters (DTensor) know PyTorch's operations only.
    op: Any = torch.ops.tempo.lamb_step_ if is_plain else reference_lamb_step_
    settings = (lr, beta1, beta2, eps, weight_decay, max_grad_norm, use_trust_ratio, bias_correction)
    op(*given.values(), step, grad_norm, found_inf, *settings)
