"""Count the bytes that the backward pass keeps."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class SavedItem:
    """One storage kept for the backward pass; `num_uses` operations share it.

    `module` is the dotted name of the submodule that ran when it was first kept ("" for the module itself or a function), and
    `source` the line of code outside PyTorch, as "folder/file.py:line".
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    num_uses: int
    module: str = ""
    source: str = ""


@dataclass
class SavedBytes:
    """What a forward pass keeps: `total_bytes`, and every storage once in `items`, largest first."""

    items: list[SavedItem] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)

    def __str__(self) -> str:
        lines = [f"{'shape':>24} {'dtype':>10} {'bytes':>14} {'uses':>5}  kept in"]
        for item in self.items:
            dtype = str(item.dtype).removeprefix("torch.")
            where = " ".join(filter(None, (item.module, f"({item.source})" if item.source else "")))
            lines.append(f"{list(item.shape)!s:>24} {dtype:>10} {item.num_bytes:>14,} {item.num_uses:>5}  {where}".rstrip())
        return "\n".join([*lines, f"{'total':>24} {'':>10} {self.total_bytes:>14,}"])


_TORCH_FOLDER = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def _source_line() -> str:
    """The innermost line outside PyTorch and this file that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path != __file__ and not path.startswith((_TORCH_FOLDER, "<")):
            return f"{'/'.join(path.split(os.sep)[-2:])}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


@contextmanager
def _running_modules(module: nn.Module | Callable[..., Any]) -> Iterator[list[str]]:
    """Keep the names of the submodules that are running, outermost first, while the context is open."""
    running: list[str] = []
    # Hooks on a compiled module would have it compiled again.
    named = module.named_modules() if isinstance(module, nn.Module) and not hasattr(module, "_orig_mod") else ()
    handles = []
    for name, child in named:
        handles.append(child.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
        handles.append(child.register_forward_hook(lambda *_: running.pop() and None, always_call=True))
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()


def saved_bytes(module: nn.Module | Callable[..., Any], *inputs: Any, **kwargs: Any) -> SavedBytes:
    """Run `module` forward and report what it keeps for the backward pass.

    Each storage counts once, whole, however many operations keep it or a view of it. The parameters and buffers of the
    module do not count; inputs that are kept do. Whatever goes through autograd is seen: PyTorch's operations, the
    `save_for_backward` of any autograd.Function, what a compiled graph keeps. A tensor that a Function keeps as an attribute
    is not. Under activation checkpointing only what is kept between the passes counts.

    Args:
        module: a module or any function; runs once, in the mode it is in.
        inputs, kwargs: its arguments.

    Returns:
        A `SavedBytes`, which prints as a table.
    """
    own = set()
    if isinstance(module, nn.Module):
        own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, SavedItem] = {}
    held = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if storage.nbytes() == 0 or address in own:
            return tensor
        if address not in kept:
            # Holding the storage keeps its address from being used again before the count is done.
            held.append(storage)
            name = running[-1] if running else ""
            kept[address] = SavedItem(tuple(tensor.shape), tensor.dtype, storage.nbytes(), 0, name, _source_line())
        kept[address] = replace(kept[address], num_uses=kept[address].num_uses + 1)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with _running_modules(module) as running, torch.enable_grad(), hooks:
        result = module(*inputs, **kwargs)
    del result
    return SavedBytes(sorted(kept.values(), key=lambda item: -item.num_bytes))
