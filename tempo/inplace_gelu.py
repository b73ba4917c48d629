"""The import path of the paper's code: `from tempo.inplace_gelu import InplaceGelu`."""

from tempo.gelu import InplaceGelu

__all__ = ["InplaceGelu"]
