"""Drop-in layers for transformers that keep far fewer bytes for the backward pass.

After "Tempo: Accelerating Transformer-Based Model Training through Memory Footprint Reduction" (arXiv 2210.10246): in-place
GELU, in-place LayerNorm, attention that recomputes its dropout.
"""

from tempo import kernels
from tempo.attention import Combined, attention
from tempo.convert import Conversion, convert
from tempo.dropout import SampleCounter, dropout
from tempo.dropout_add_layer_norm import DropoutAddLayerNorm, dropout_add_layer_norm
from tempo.gelu import InplaceGelu, gelu
from tempo.lamb import lamb_step_
from tempo.layer_norm import InplaceLayerNorm, layer_norm
from tempo.linear import Linear, linear
from tempo.mlp import MLP, mlp
from tempo.philox import keep_mask, make_rng
from tempo.saved_bytes import SavedBytes, SavedItem, saved_bytes

__version__ = "0.1.0"

kernels._report_at_import()

__all__ = [
    "MLP",
    "Combined",
    "Conversion",
    "DropoutAddLayerNorm",
    "InplaceGelu",
    "InplaceLayerNorm",
    "Linear",
    "SampleCounter",
    "SavedBytes",
    "SavedItem",
    "attention",
    "convert",
    "dropout",
    "dropout_add_layer_norm",
    "gelu",
    "keep_mask",
    "kernels",
    "lamb_step_",
    "layer_norm",
    "linear",
    "make_rng",
    "mlp",
    "saved_bytes",
]
