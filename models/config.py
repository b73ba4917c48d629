"""What a BERT is made of."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any, Literal

# name -> (layers, hidden size); a head is 64 wide, the MLP 4 times the hidden size. Sizes: Turc et al. 2019, Devlin et al. 2018.
PRESETS = {
    "bert_tiny": (2, 128),
    "bert_mini": (4, 256),
    "bert_small": (4, 512),
    "bert_medium": (8, 512),
    "bert_base": (12, 768),
    "bert_large": (24, 1024),
}
_HEAD_WIDTH = 64
# Rows of the word embedding are padded to a multiple of this: 16-bit matrix units want it.
_VOCABULARY_MULTIPLE = 8

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
)
_CHOICES = {
    "gelu": ("erf", "tanh"),
    "layers": ("torch", "tempo"),
    "gelu_side_bits": (1, 4),
    "dropout_generator": ("auto", "torch", "philox"),
}


def suggest(name: str, allowed: list[str]) -> str:
    """Return " (did you mean 'x'?)" where something allowed is close to `name`, else an empty string."""
    close = difflib.get_close_matches(str(name), allowed, n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


@dataclass(frozen=True)
class BertConfig:
    """The shape of a BERT and the way its layers are computed; immutable.

    Attributes:
        vocab_size: tokens in the vocabulary; the embedding has `padded_vocab_size` rows.
        hidden_size: width of the residual stream.
        num_layers: encoder layers.
        num_heads: attention heads per layer.
        intermediate_size: width inside the MLP.
        max_position_embeddings: longest sequence.
        type_vocab_size: segments that `token_type_ids` tell apart.
        hidden_dropout: after the embeddings, the attention output and the MLP.
        attention_dropout: on the attention probabilities.
        gelu: "erf" (exact) or "tanh".
        layer_norm_eps: added to the variance.
        initializer_range: standard deviation of the initial weights.
        layers: "torch" (the paper's baseline) or "tempo" (all three techniques below).
        inplace_gelu: switch this technique alone; None = as `layers` says.
        inplace_layer_norm: likewise.
        dropout_recomputation: likewise; attention and hidden dropout keep no mask and no dropped copy.
        gelu_side_bits: bits per element that in-place GELU keeps beside its output, 1 or 4.
        dropout_generator: "torch" (PyTorch's generator), "philox" (masks that are a function of seed, sample and place), or
            "auto": philox where dropout is recomputed, torch elsewhere.
        activation_checkpointing: keep only each layer's input, and run the layer again in the backward pass.
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    gelu: Literal["erf", "tanh"] = "erf"
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    layers: Literal["torch", "tempo"] = "torch"
    inplace_gelu: bool | None = None
    inplace_layer_norm: bool | None = None
    dropout_recomputation: bool | None = None
    gelu_side_bits: Literal[1, 4] = 1
    dropout_generator: Literal["auto", "torch", "philox"] = "auto"
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("layer_norm_eps", "initializer_range"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"model.{name} must be at least 0, got {getattr(self, name)}")
        if self.hidden_size % self.num_heads:
            raise ValueError(f"model.hidden_size ({self.hidden_size}) must be a multiple of model.num_heads ({self.num_heads})")
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"model.{name} must lie in [0, 1], got {getattr(self, name)}")
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                hint = suggest(value, [str(a) for a in allowed])
                raise ValueError(f"model.{name} must be one of {', '.join(map(str, allowed))}, got {value!r}{hint}")
        if self.dropout_generator == "torch" and self.uses_dropout_recomputation:
            raise ValueError(
                "model.dropout_generator 'torch' cannot be combined with dropout recomputation, which draws its masks again;"
                " use 'philox' or 'auto', or set model.dropout_recomputation to false"
            )

    @staticmethod
    def preset(name: str, **overrides: Any) -> BertConfig:
        """Return a published size by name, fields overridden by keyword.

        Raises:
            ValueError: an unknown preset or field, with a suggestion.
        """
        if name not in PRESETS:
            hint = suggest(name, list(PRESETS))
            raise ValueError(f"model.preset must be one of {', '.join(PRESETS)}, got {name!r}{hint}")
        num_layers, hidden_size = PRESETS[name]
        sizes = {
            "num_layers": num_layers,
            "hidden_size": hidden_size,
            "num_heads": hidden_size // _HEAD_WIDTH,
            "intermediate_size": 4 * hidden_size,
        }
        known = [field.name for field in dataclasses.fields(BertConfig)]
        for key in overrides:
            if key not in known:
                raise ValueError(f"model.{key} is not a field of the model{suggest(key, known)}")
        return BertConfig(**{**sizes, **overrides})

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the word embedding: `vocab_size` rounded up to a multiple of 8."""
        return -(-self.vocab_size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE

    def _technique(self, switch: bool | None) -> bool:
        return self.layers == "tempo" if switch is None else switch

    @property
    def uses_inplace_gelu(self) -> bool:
        return self._technique(self.inplace_gelu)

    @property
    def uses_inplace_layer_norm(self) -> bool:
        return self._technique(self.inplace_layer_norm)

    @property
    def uses_dropout_recomputation(self) -> bool:
        return self._technique(self.dropout_recomputation)

    @property
    def uses_philox(self) -> bool:
        """Whether the masks are a function of (seed, sample, place)."""
        return self.dropout_generator == "philox" or self.uses_dropout_recomputation
