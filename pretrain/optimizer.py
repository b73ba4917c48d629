"""LAMB (You et al. 2020, as in NVIDIA's BERT recipe) and AdamW, and which parameters decay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

NAMES = ("lamb", "adamw")


def global_grad_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """L2 norm of all gradients together, float32 scalar; 0 where there is none. Does not wait for the device."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


class Lamb(torch.optim.Optimizer):
    """Layer-wise adaptive moments.

    With g the gradient, G the global norm over all groups, and t counting steps from 1:

        g <- g / max(1, G / max_grad_norm)
        m <- b1 m + (1 - b1) g           m_hat = m / (1 - b1^t)
        v <- b2 v + (1 - b2) g^2         v_hat = v / (1 - b2^t)
        u = m_hat / (sqrt(v_hat) + eps) + weight_decay * w
        w <- w - lr * r * u              r = |w| / |u|, 1 where either norm is 0

    r is used where weight_decay is not 0, everywhere with `nvlamb`. Computed by `torch._foreach_*` over all tensors of a
    group; no host synchronisation.

    Args:
        params: parameters or groups; 16-bit parameters work, moments are float32 all the same.
        lr: learning rate.
        betas: decay of m and v.
        eps: added to sqrt(v_hat).
        weight_decay: per group.
        max_grad_norm: global clipping; None or 0 does not clip.
        nvlamb: use the trust ratio for parameters without decay too.
        bias_correction: divide the moments by 1 - beta^t.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        max_grad_norm: float | None = 1.0,
        nvlamb: bool = False,
        bias_correction: bool = True,
    ) -> None:
        if not all(value >= 0 for value in (lr, eps, weight_decay, max_grad_norm or 0)):  # NaN is refused too
            raise ValueError(
                f"lr, eps, weight_decay and max_grad_norm must not be negative, got {lr}, {eps}, {weight_decay}, {max_grad_norm}"
            )
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must lie in [0, 1), got {betas}")
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "step": 0}
        super().__init__(params, defaults)
        self.max_grad_norm, self.nvlamb, self.bias_correction = max_grad_norm, nvlamb, bias_correction

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` returned; the moments stay float32.

        `torch.optim.Optimizer` would cast them to the parameter's dtype, and a resumed run with 16-bit parameters would differ.
        """
        super().load_state_dict(state_dict)
        saved = state_dict["state"]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(indices, parameters, strict=True):
            if p.dtype != torch.float32 and index in saved:
                self.state[p] = {name: value.to(p.device, torch.float32, copy=True) for name, value in saved[index].items()}

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None, *, grad_norm: Tensor | None = None) -> Tensor | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: runs forward and backward again and returns the loss.
            grad_norm: the global gradient norm where the caller has it already.

        Raises:
            ValueError: a sparse gradient; nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        if any(p.grad is not None and p.grad.is_sparse for p in parameters):
            raise ValueError("Lamb takes dense gradients; make embeddings with sparse=False")
        if grad_norm is None:
            grad_norm = global_grad_norm(parameters)
        # A tensor, so that the host need not know it.
        clip = (grad_norm / self.max_grad_norm).clamp(min=1.0) if self.max_grad_norm else torch.ones_like(grad_norm)
        for group in self.param_groups:
            group["step"] += 1
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update_group(group, parameters, clip)
        return loss

    def _moments(self, parameters: list[nn.Parameter]) -> tuple[list[Tensor], list[Tensor]]:
        for p in parameters:
            if not self.state[p]:
                self.state[p]["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
        return [self.state[p]["exp_avg"] for p in parameters], [self.state[p]["exp_avg_sq"] for p in parameters]

    def _update_group(self, group: dict[str, Any], parameters: list[nn.Parameter], clip: Tensor) -> None:
        beta_1, beta_2 = group["betas"]
        exp_avg, exp_avg_sq = self._moments(parameters)
        weights = [p.float() for p in parameters]  # the parameters themselves where they are float32
        gradients = torch._foreach_div([p.grad.float() for p in parameters], clip)  # type: ignore[union-attr]

        torch._foreach_lerp_(exp_avg, gradients, 1.0 - beta_1)
        torch._foreach_mul_(exp_avg_sq, beta_2)
        torch._foreach_addcmul_(exp_avg_sq, gradients, gradients, 1.0 - beta_2)

        # u = m_hat / (sqrt(v_hat) + eps) + wd w
        correction_1, correction_2 = (1.0 - beta ** group["step"] if self.bias_correction else 1.0 for beta in group["betas"])
        denominator = torch._foreach_div(exp_avg_sq, correction_2)
        torch._foreach_sqrt_(denominator)
        torch._foreach_add_(denominator, group["eps"])
        update = torch._foreach_div(exp_avg, correction_1)
        torch._foreach_div_(update, denominator)
        if group["weight_decay"] != 0:
            torch._foreach_add_(update, weights, alpha=group["weight_decay"])
        if group["weight_decay"] != 0 or self.nvlamb:
            torch._foreach_mul_(update, self._trust_ratios(weights, list(update)))
        torch._foreach_add_(weights, update, alpha=-group["lr"])
        if any(p.dtype != torch.float32 for p in parameters):
            torch._foreach_copy_(list[Tensor](parameters), weights)

    @staticmethod
    def _trust_ratios(weights: list[Tensor], update: list[Tensor]) -> list[Tensor]:
        weight_norms = torch.stack(torch._foreach_norm(weights))
        update_norms = torch.stack(torch._foreach_norm(update))
        usable = (weight_norms > 0) & (update_norms > 0)
        return list(torch.where(usable, weight_norms / update_norms, torch.ones_like(weight_norms)).unbind())


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the parameters into those that decay and those that do not: biases and all of every LayerNorm.

    Every layer mode gives the same split: Tempo's LayerNorm is an `nn.LayerNorm`. A tied parameter comes once.
    """
    undecayed = {
        id(p)
        for module in model.modules()
        for name, p in module.named_parameters(recurse=False)
        if isinstance(module, nn.LayerNorm) or name == "bias"
    }
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if id(p) not in undecayed], "weight_decay": weight_decay},
        {"params": [p for p in parameters if id(p) in undecayed], "weight_decay": 0.0},
    ]


def build_optimizer(
    model: nn.Module,
    *,
    name: str,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    max_grad_norm: float,
    nvlamb: bool = False,
) -> torch.optim.Optimizer:
    """Return LAMB or AdamW over `parameter_groups(model)`. LAMB clips by itself; AdamW's caller clips.

    Raises:
        ValueError: an unknown name.
    """
    groups = parameter_groups(model, weight_decay)
    if name == "lamb":
        return Lamb(groups, lr=learning_rate, betas=betas, eps=eps, max_grad_norm=max_grad_norm, nvlamb=nvlamb)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, foreach=True)
    raise ValueError(f"optimizer.name must be one of {', '.join(NAMES)}, got {name!r}")
