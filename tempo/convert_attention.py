"""What a converted HuggingFace model calls: attention as transformers' registry of attention functions wants it, and the seeds.

Every dropout takes a seed from PyTorch's generator at every call, as `nn.Dropout` takes its mask: `torch.manual_seed` repeats a
run, and gradient checkpointing, which restores that generator, draws the same masks again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tempo.attention import attention
from tempo.philox import fresh_rng

IMPLEMENTATION = "tempo"
# Odd, so that no two ranks get one seed; below 2^63 / 2^20, so that a million ranks do not overflow.
_SEED_STEP_PER_RANK = 0x5851F42D4C9


def draw_rng(device: torch.device) -> Tensor:
    """Return int64 [2] = (a fresh seed, 0); ranks whose generators are in the same state get different seeds."""
    rng = fresh_rng(device)
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if rank > 0:
        rng[0] += rank * _SEED_STEP_PER_RANK
    return rng


def _alone(tensor: Tensor, other: Tensor) -> Tensor:
    """A copy where `tensor` would keep a larger storage alive that `other` is no part of.

    GPT-2 projects query, key and value at once; with a cache the keys and values are copies, and the query alone would keep all.
    """
    if torch.compiler.is_compiling():
        return tensor
    storage = tensor.untyped_storage()
    shared = storage.data_ptr() == other.untyped_storage().data_ptr()
    return tensor if shared or storage.nbytes() <= tensor.nbytes else tensor.contiguous()


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    head_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls with query, key, value [B, N, Q or K, D]; returns [B, Q, N, D] and no probabilities."""
    if head_mask is not None:
        raise ValueError("head_mask is not supported by Tempo's attention: convert with attention=False")
    mask = attention_mask if attention_mask is None else attention_mask[..., : key.shape[-2]]
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", False))
    # As transformers' own functions do: a mask that was made holds the causal part.
    causal = is_causal and mask is None and query.shape[-2] > 1
    rng = draw_rng(query.device) if dropout > 0.0 else None
    context = attention(_alone(query, key), key, value, mask, p=dropout, rng=rng, scale=scaling, causal=causal)
    return context.transpose(1, 2), None


def _make_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """A bool mask (True = attend) that always holds the causal part; None where there is nothing to hide."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


def register_attention() -> None:
    """Make "tempo" an attention implementation of transformers.

    Raises:
        ValueError: this transformers has no registries for it.
    """
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise ValueError(f"this transformers has no registry of attention functions ({error}): use attention=False") from error
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _make_mask)


def _uses_tempo(model: nn.Module) -> bool:
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(getattr(config, "_attn_implementation", None) == IMPLEMENTATION for config in configs)


class Guard:
    """Runs before a converted model: refuses what Tempo's attention cannot give."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("output_attentions") and _uses_tempo(module):
            raise ValueError(
                "output_attentions=True: Tempo's attention does not hand out its probabilities; load the model unconverted"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_guard, ()


def _unpickle_guard() -> Guard:
    # A model that was pickled may be loaded where nothing was converted.
    register_attention()
    return Guard()


def add_guard(module: nn.Module) -> None:
    if not any(isinstance(hook, Guard) for hook in module._forward_pre_hooks.values()):
        module.register_forward_pre_hook(Guard(), with_kwargs=True)
