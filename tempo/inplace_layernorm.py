"""The import path of the paper's code: `from tempo.inplace_layernorm import InplaceLayerNorm`."""

from tempo.layer_norm import InplaceLayerNorm

__all__ = ["InplaceLayerNorm"]
