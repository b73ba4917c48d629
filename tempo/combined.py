"""The import path of the paper's code: `from tempo.combined import Combined`."""

from tempo.attention import Combined

__all__ = ["Combined"]
