"""Swap the layers of a HuggingFace BERT, RoBERTa or GPT-2 for Tempo's, in place.

Modules keep their names, parameters and hooks: an optimizer made before stays valid and `state_dict` does not change. LayerNorm,
GELU and dropout modules get another class; attention goes through transformers' own registry of attention functions, see
tempo/convert_attention.py.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from tempo.convert_attention import IMPLEMENTATION, add_guard, draw_rng, register_attention
from tempo.dropout import dropout as tempo_dropout
from tempo.gelu import gelu as tempo_gelu
from tempo.layer_norm import InplaceLayerNorm
from tempo.philox import check_probability

MODEL_TYPES = ("bert", "roberta", "gpt2")
_ATTENTIONS = (
    "BertSelfAttention",
    "BertCrossAttention",
    "BertSdpaSelfAttention",
    "RobertaSelfAttention",
    "RobertaCrossAttention",
    "RobertaSdpaSelfAttention",
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
_GELU_AS_A_FUNCTION = ("RobertaLMHead",)


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
        return tempo_dropout(input, self.p, draw_rng(input.device), site=0)


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
        if not self.changes:
            lines.insert(0, "nothing changed: the model is converted already")
        return "\n".join(lines)


# ---- attention ----


def _check_attention(name: str, module: Any) -> None:
    """Refuse what Tempo's attention would not compute as `module` does, before anything is changed.

    Raises:
        ValueError: says which module, and why.
    """
    kind = type(module).__name__
    if not hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS"):
        raise ValueError(
            f"{name}: {kind} of this transformers does not look its attention up in ALL_ATTENTION_FUNCTIONS; use transformers 5,"
            " or attention=False"
        )
    if getattr(module, "position_embedding_type", "absolute") != "absolute":
        raise ValueError(f"{name}: position_embedding_type {module.position_embedding_type!r} is not supported; attention=False")
    if getattr(module, "reorder_and_upcast_attn", False):
        raise ValueError(f"{name}: reorder_and_upcast_attn computes the scores in float32, which Tempo's attention does not")
    if getattr(module.config, "output_attentions", False):
        raise ValueError(f"{name}: config.output_attentions is True, and Tempo's attention does not hand out its probabilities")


def _convert_attention(modules: dict[str, nn.Module], report: Conversion) -> None:
    found: dict[str, Any] = {name: module for name, module in modules.items() if type(module).__name__ in _ATTENTIONS}
    if not found:
        return
    for name, module in found.items():
        _check_attention(name, module)
    register_attention()
    # Copies of their own: other models may share a configuration, and would find Tempo's attention there.
    own: dict[int, Any] = {}
    for name, module in found.items():
        before = module.config._attn_implementation
        if before != IMPLEMENTATION:
            report.changes.append(Change(name, f"{type(module).__name__} ({before})", "tempo.attention"))
            own.setdefault(id(module.config), copy.deepcopy(module.config))
    for config in own.values():
        config._attn_implementation = IMPLEMENTATION
    for module in modules.values():
        config = getattr(module, "config", None)
        if id(config) in own:
            module.config = own[id(config)]
        if hasattr(module, "base_model_prefix"):  # a model, which may be called alone
            add_guard(module)


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
    elif wanted["gelu"] and before in _GELU_AS_A_FUNCTION:
        report.unchanged.append((name, f"{before} calls GELU as a function, which cannot be swapped"))
    elif wanted["dropout"] and type(module) is nn.Dropout:
        if module.inplace:
            report.unchanged.append((name, "Dropout with inplace=True"))
            return
        module.__class__ = ConvertedDropout
        report.changes.append(Change(name, before, "tempo.dropout"))


def _check_dropouts(modules: dict[str, nn.Module]) -> None:
    for name, module in modules.items():
        if isinstance(module, nn.Dropout):
            try:
                check_probability(module.p)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None


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

    Every dropout takes a fresh seed from PyTorch's generator at every call: `torch.manual_seed` repeats a run, gradient
    checkpointing draws the same masks again, and ranks of `torch.distributed` draw different ones though seeded alike. Works
    under `torch.compile(fullgraph=True)`. A model that was saved with `save_pretrained` loads unconverted.

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
    if dropout or attention:
        _check_dropouts(modules)
    if attention:
        _convert_attention(modules, report)
    for name, module in modules.items():
        if id(module) not in inside:
            _convert_module(name, module, wanted, gelu_side_bits, report)
    known = (InplaceLayerNorm, ConvertedGelu, ConvertedDropout)
    if not report.changes and not any(isinstance(module, known) for module in modules.values()):
        raise ValueError(f"{type(model).__name__} holds none of the layers that convert was asked to swap")
    return report
