"""Count the bytes that the backward pass keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class SavedItem:
    """One storage kept for the backward pass; `num_uses` operations share it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    num_uses: int


@dataclass
class SavedBytes:
    """What a forward pass keeps: `total_bytes`, and every storage once in `items`, largest first."""

    items: list[SavedItem] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)

    def __str__(self) -> str:
        lines = [f"{'shape':>24} {'dtype':>10} {'bytes':>14} {'uses':>5}"]
        for item in self.items:
            dtype = str(item.dtype).removeprefix("torch.")
            lines.append(f"{list(item.shape)!s:>24} {dtype:>10} {item.num_bytes:>14,} {item.num_uses:>5}")
        return "\n".join([*lines, f"{'total':>24} {'':>10} {self.total_bytes:>14,}"])


def saved_bytes(module: nn.Module | Callable[..., Any], *inputs: Any, **kwargs: Any) -> SavedBytes:
    """Run `module` forward and report what it keeps for the backward pass.

    Each storage counts once, whole, however many operations keep it or a view of it. The parameters and buffers of the
    module do not count; inputs that are kept do.

    Args:
        module: a module or any function; runs once, in the mode it is in.
        inputs, kwargs: its arguments.

    Returns:
        A `SavedBytes`, which prints as a table.
    """
    own = set()
    if isinstance(module, nn.Module):
        own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, tuple[Tensor, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() > 0 and storage.data_ptr() not in own:
            # Holding the tensor keeps its address from being used again before the count is done.
            kept[storage.data_ptr()] = (tensor, kept.get(storage.data_ptr(), (tensor, 0))[1] + 1)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = module(*inputs, **kwargs)
    del result
    items = [SavedItem(tuple(t.shape), t.dtype, t.untyped_storage().nbytes(), uses) for t, uses in kept.values()]
    return SavedBytes(sorted(items, key=lambda item: -item.num_bytes))
