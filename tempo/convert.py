"""Swap the layers of a HuggingFace BERT, RoBERTa or GPT-2 for Tempo's, in place.

Modules keep their names, parameters and hooks: an optimizer made before stays valid and `state_dict` does not change. LayerNorm,
GELU and dropout modules get another class; attention goes through transformers' own registry of attention functions.

Masks are drawn by Philox from a seed that every dropout takes from PyTorch's generator at every call, as `nn.Dropout` takes its
mask: `torch.manual_seed` repeats a run, and gradient checkpointing, which restores that generator, draws the same masks again.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tempo.attention import attention as tempo_attention
from tempo.dropout import dropout as tempo_dropout
from tempo.gelu import gelu as tempo_gelu
from tempo.layer_norm import InplaceLayerNorm
from tempo.philox import check_probability, fresh_rng

MODEL_TYPES = ("bert", "roberta", "gpt2")
_ATTENTIONS = (
    "BertSelfAttention",
    "BertCrossAttention",
    "RobertaSelfAttention",
    "RobertaCrossAttention",
    "GPT2Attention",
)
# transformers' activation classes and the form of GELU they compute; "quick" and clipped ones are other functions.
_GELU_FORMS = {
    "GELUActivation": "none",
    "NewGELUActivation": "tanh",
    "FastGELUActivation": "tanh",
    "AccurateGELUActivation": "tanh",
    "GELUTanh": "tanh",
    "PytorchGELUTanh": "tanh",
}
_IMPLEMENTATION = "tempo"


class ConvertedGelu(nn.Module):
    """GELU that keeps its output and side bits; takes the place of transformers' activation modules."""

    approximate: str
    side_bits: int

    def forward(self, input: Tensor) -> Tensor:
        # Not over the input: whether something else needs that, only the model knows. Nothing keeps it either.
        return tempo_gelu(input, self.approximate, self.side_bits)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}, side_bits={self.side_bits}"


class ConvertedDropout(nn.Dropout):
    """`nn.Dropout` that keeps 16 bytes instead of a mask."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return input
        return tempo_dropout(input, self.p, fresh_rng(input.device), site=0)


@dataclass(frozen=True)
class Change:
    """One module: its dotted name, what it was, and what it is now."""

    name: str
    before: str
    after: str


@dataclass
class Conversion:
    """What `convert` changed, and what it left although it might have been expected to change; prints as a table."""

    changes: list[Change] = field(default_factory=list)
    unchanged: list[tuple[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        counts = Counter((change.before, change.after) for change in self.changes)
        lines = [f"{count:>5} x {before} -> {after}" for (before, after), count in counts.items()]
        lines += [f"{change.name}: {change.before} -> {change.after}" for change in self.changes]
        lines += [f"{name}: {why}" for name, why in self.unchanged]
        return "\n".join(lines or ["nothing changed: the model is converted already"])


# ---- attention, through transformers' registries ----


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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls with query, key, value [B, N, Q or K, D]; returns [B, Q, N, D] and no probabilities."""
    mask = attention_mask if attention_mask is None else attention_mask[..., : key.shape[-2]]
    # As transformers' own functions do where no mask was made.
    causal = mask is None and bool(getattr(module, "is_causal", False)) and query.shape[-2] > 1
    rng = fresh_rng(query.device) if dropout > 0.0 else None
    context = tempo_attention(_alone(query, key), key, value, mask, p=dropout, rng=rng, scale=scaling, causal=causal)
    return context.transpose(1, 2), None


def _make_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """A bool mask (True = attend) that always holds the causal part; None where there is nothing to hide."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


def _register_attention() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_IMPLEMENTATION, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_IMPLEMENTATION, _make_mask)


class _Guard:
    """Runs before a converted model: refuses what Tempo's attention cannot give. A copy in another process registers it there."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("output_attentions"):
            raise ValueError(
                "output_attentions=True: Tempo's attention does not hand out its probabilities; load the model unconverted"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        _register_attention()


def _convert_attention(model: nn.Module, modules: dict[str, nn.Module], report: Conversion) -> None:
    found = {name: module for name, module in modules.items() if type(module).__name__ in _ATTENTIONS}
    for name, module in found.items():
        if not hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS"):
            raise ValueError(
                f"{name}: {type(module).__name__} of this transformers does not look its attention up in"
                " ALL_ATTENTION_FUNCTIONS; use transformers 5, or attention=False"
            )
        if getattr(module, "position_embedding_type", "absolute") != "absolute":
            raise ValueError(
                f"{name}: position_embedding_type {module.position_embedding_type!r} is not supported; attention=False"
            )
        if getattr(module, "reorder_and_upcast_attn", False):
            raise ValueError(f"{name}: reorder_and_upcast_attn computes the scores in float32, which Tempo's attention does not")
    config: Any = model.config
    if config._attn_implementation == _IMPLEMENTATION:
        return
    if getattr(config, "output_attentions", False):
        raise ValueError("config.output_attentions is True: Tempo's attention does not hand out its probabilities")
    before = config._attn_implementation
    if found:
        _register_attention()
        # Of its own: other models may share the configuration, and would find Tempo's attention there.
        own = copy.deepcopy(config)
        own._attn_implementation = _IMPLEMENTATION
        for module in modules.values():
            if getattr(module, "config", None) is config:
                module.config = own
        model.register_forward_pre_hook(_Guard(), with_kwargs=True)
    report.changes += [Change(n, f"{type(m).__name__} ({before})", "tempo.attention") for n, m in found.items()]


# ---- the other layers ----


def _convert_module(name: str, module: Any, wanted: dict[str, bool], side_bits: int, report: Conversion) -> None:
    before = type(module).__name__
    form = module.approximate if type(module) is nn.GELU else _GELU_FORMS.get(before)
    if wanted["layer_norm"] and type(module) is nn.LayerNorm:
        if len(module.normalized_shape) != 1:
            report.unchanged.append((name, f"LayerNorm over {list(module.normalized_shape)}: only one dimension is supported"))
            return
        module.__class__ = InplaceLayerNorm
        report.changes.append(Change(name, before, "tempo.InplaceLayerNorm"))
    elif wanted["gelu"] and form is not None:
        module.__class__ = ConvertedGelu
        module.approximate, module.side_bits = form, side_bits
        report.changes.append(Change(name, before, f"tempo.gelu ({form}, {side_bits} bit)"))
    elif wanted["gelu"] and name.endswith(("act", "act_fn")) and not isinstance(module, ConvertedGelu):
        report.unchanged.append((name, f"{before} is not GELU"))
    elif wanted["dropout"] and type(module) is nn.Dropout:
        check_probability(module.p)
        if module.inplace:
            report.unchanged.append((name, "Dropout with inplace=True"))
            return
        module.__class__ = ConvertedDropout
        report.changes.append(Change(name, before, "tempo.dropout"))


def convert(
    model: nn.Module,
    *,
    gelu: bool = True,
    layer_norm: bool = True,
    attention: bool = True,
    dropout: bool = True,
    gelu_side_bits: int = 1,
) -> Conversion:
    """Swap the layers of a transformers BERT, RoBERTa or GPT-2 model in place; each technique can be left out.

    Args:
        model: `BertModel`, `BertForPreTraining`, `RobertaForMaskedLM`, `GPT2LMHeadModel` and so on; parameters of any floating
            dtype. It computes the same, up to rounding, and its dropout draws other masks.
        gelu: keep GELU's output and side bits instead of its input.
        layer_norm: keep LayerNorm's output instead of its input.
        attention: keep the probabilities once, and no mask of their dropout.
        dropout: keep no mask of the hidden dropouts.
        gelu_side_bits: 1, or 4 for a 16-bit gradient as accurate as PyTorch's.

    Returns:
        A `Conversion`, which prints what changed; empty for a model that was converted before.

    Raises:
        ValueError: another kind of model, a variant of attention that is not supported, `gelu_side_bits` other than 1 or 4, or
            a model that holds none of these layers. Nothing was changed.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type not in MODEL_TYPES:
        raise ValueError(
            f"convert takes transformers models of type {', '.join(MODEL_TYPES)};"
            f" got {type(model).__name__} of type {model_type!r}"
        )
    if gelu_side_bits not in (1, 4):
        raise ValueError(f"gelu_side_bits must be 1 or 4, got {gelu_side_bits}")
    modules = dict(model.named_modules())
    # The dropout inside an attention module only holds its probability: the attention function does the dropping.
    inside = {
        id(child)
        for m in modules.values()
        if type(m).__name__ in _ATTENTIONS
        for n, child in m.named_children()
        if n in ("dropout", "attn_dropout")
    }
    wanted = {"gelu": gelu, "layer_norm": layer_norm, "dropout": dropout}
    report = Conversion()
    for module in modules.values():
        if dropout and isinstance(module, nn.Dropout):
            check_probability(module.p)
    if attention:
        _convert_attention(model, modules, report)
    for name, module in modules.items():
        if id(module) not in inside:
            _convert_module(name, module, wanted, gelu_side_bits, report)
    known = (InplaceLayerNorm, ConvertedGelu, ConvertedDropout)
    if not report.changes and not any(isinstance(module, known) for module in modules.values()):
        raise ValueError(f"{type(model).__name__} holds none of the layers that convert was asked to swap")
    return report
