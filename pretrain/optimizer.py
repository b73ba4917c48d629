"""LAMB (You et al. 2020, as in NVIDIA's BERT recipe) and AdamW, and which parameters decay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tempo

NAMES = ("lamb", "adamw")


def global_grad_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """L2 norm of all gradients together, float32 scalar; 0 where there is none. Does not wait for the device."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


class Lamb(torch.optim.Optimizer):
    """Layer-wise adaptive moments: the formulas stand in tempo/lamb.py, where the step itself is.

    The trust ratio r is used where weight_decay is not 0, everywhere with `nvlamb`. A step whose gradients are not finite
    changes nothing, and the host does not wait to find out: `param_groups[i]["step"]`, the number of applied steps, is a tensor
    on the parameters' device once a step was made (an int before that and in `state_dict()`). `GradScaler.step` leaves
    unscaling and skipping to the optimizer.

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

    # GradScaler then sets `grad_scale` (None where it has unscaled already) and `found_inf`, which exist during `step` only.
    _step_supports_amp_scaling = True

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

    def state_dict(self) -> dict[str, Any]:
        """Return moments, settings and the number of applied steps as an int, for which the host waits for the device."""
        state = super().state_dict()
        for group in state["param_groups"]:
            group["step"] = int(group["step"])
        return state

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
        """Update every parameter that has a gradient; nothing at all where the norm is not finite.

        Args:
            closure: runs forward and backward again and returns the loss.
            grad_norm: the global norm of the gradients as they are now, where the caller has it already.

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
        if isinstance(grad_norm, DTensor):  # of sharded gradients
            grad_norm = grad_norm.full_tensor()
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if grad_scale is not None:
            # In place, as `GradScaler.unscale_` does.
            for gradient in (p.grad for p in parameters if p.grad is not None):
                gradient.div_(grad_scale.to(gradient.device))
            grad_norm = grad_norm / grad_scale.to(grad_norm.device)
        for group in self.param_groups:
            self._update_group(group, grad_norm, found_inf)
        return loss

    def _moments(self, parameters: list[nn.Parameter]) -> tuple[list[Tensor], list[Tensor]]:
        for p in parameters:
            if not self.state[p]:
                self.state[p]["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
        return [self.state[p]["exp_avg"] for p in parameters], [self.state[p]["exp_avg_sq"] for p in parameters]

    def _update_group(self, group: dict[str, Any], grad_norm: Tensor, found_inf: Tensor | None) -> None:
        if not group["params"]:
            return
        device = group["params"][0].device
        if not isinstance(group["step"], Tensor) or group["step"].device != device:
            group["step"] = torch.tensor(int(group["step"]), device=device)
        parameters = [p for p in group["params"] if p.grad is not None]
        tempo.lamb_step_(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            *self._moments(parameters),
            group["step"],
            grad_norm.to(device),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            max_grad_norm=self.max_grad_norm or 0.0,
            use_trust_ratio=group["weight_decay"] != 0 or self.nvlamb,
            bias_correction=self.bias_correction,
            found_inf=None if found_inf is None else found_inf.to(device),
        )


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
