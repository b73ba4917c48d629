"""LAMB as PyTorch's multi-tensor operations compute it, without a kernel: what tempo's is measured against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pretrain.optimizer import Lamb


class ForeachLamb(Lamb):
    """`Lamb` for float32 parameters in `torch._foreach_*`; it does not skip steps, and counts them on the host."""

    def _update_group(self, group: dict[str, Any], grad_norm: Tensor, found_inf: Tensor | None) -> None:
        group["step"] += 1
        parameters = [p for p in group["params"] if p.grad is not None]
        exp_avg, exp_avg_sq = self._moments(parameters)
        weights = [p.detach() for p in parameters]
        clip = (grad_norm / self.max_grad_norm).clamp(min=1.0) if self.max_grad_norm else torch.ones_like(grad_norm)
        gradients = torch._foreach_div([p.grad for p in parameters if p.grad is not None], clip)
        beta_1, beta_2 = group["betas"]
        torch._foreach_lerp_(exp_avg, gradients, 1.0 - beta_1)
        torch._foreach_mul_(exp_avg_sq, beta_2)
        torch._foreach_addcmul_(exp_avg_sq, gradients, gradients, 1.0 - beta_2)

        denominator = torch._foreach_div(exp_avg_sq, 1.0 - beta_2 ** group["step"])
        torch._foreach_sqrt_(denominator)
        torch._foreach_add_(denominator, group["eps"])
        update = torch._foreach_div(exp_avg, 1.0 - beta_1 ** group["step"])
        torch._foreach_div_(update, denominator)
        if group["weight_decay"] != 0:
            torch._foreach_add_(update, weights, alpha=group["weight_decay"])
            weight_norms, update_norms = (torch.stack(torch._foreach_norm(tensors)) for tensors in (weights, list(update)))
            usable = (weight_norms > 0) & (update_norms > 0)
            ratios = torch.where(usable, weight_norms / update_norms, torch.ones_like(weight_norms))
            torch._foreach_mul_(update, list[Tensor](ratios.unbind()))
        torch._foreach_add_(weights, update, alpha=-group["lr"])
