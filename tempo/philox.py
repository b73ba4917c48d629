"""Philox4x32-10 dropout masks: the keep bit of an element is a pure function of (seed, site, place), so none is stored.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Key = the 64-bit seed; counter =
(element // 4 as two words, site as two words); element e uses word e % 4 of its block. The element index counts in the
padded layout over all samples trained so far: e = first_sample * (elements of one sample) + flat index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
# Blocks per pass: a few int64 temporaries of half a megabyte each, whatever the size of the mask.
_CHUNK_BLOCKS = 1 << 16


def make_rng(seed: int, first_sample: int = 0, device: torch.device | str | None = None) -> Tensor:
    """Return the `rng` argument of every Tempo layer.

    Args:
        seed: key of the generator, any 64-bit integer.
        first_sample: how many samples were trained before the first of this batch.
        device: where the layer's input lies.

    Returns:
        int64 [2] = (seed, first_sample).
    """
    return torch.tensor([_signed(seed), first_sample], dtype=torch.int64, device=device)


def _signed(seed: int) -> int:
    """The int64 that has the low 64 bits of `seed`."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def check_rng(rng: Tensor) -> None:
    if rng.dtype != torch.int64 or rng.shape != (2,):
        raise ValueError(f"rng must be int64 [2] = (seed, first_sample), got {rng.dtype} {list(rng.shape)}; see tempo.make_rng")


def check_probability(p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"the dropout probability must lie in [0, 1], got {p}")


def check_batched(shape: Sequence[int]) -> None:
    if len(shape) == 0:
        raise ValueError("dropout needs a tensor with a batch dimension, got a scalar")


def fresh_rng(device: torch.device) -> Tensor:
    """Return int64 [2] = (a seed from PyTorch's generator of the device, 0); does not wait for the device.

    For layers without a trainer's `rng`. Activation checkpointing, which restores that generator, draws the same again.
    """
    rng = torch.zeros(2, dtype=torch.int64, device=device)
    rng[0] = torch.randint(-(2**63), 2**63 - 1, (), device=device)
    return rng


def drop_threshold(p: float) -> int:
    """An element is dropped where its 32-bit word is below this."""
    return round(p * 2.0**32)


def keep_scale(p: float) -> float:
    """What kept values are multiplied by; p = 1 keeps none."""
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


def _philox_words(block: Tensor, site: int, seed: Tensor) -> Tensor:
    """Return the four output words, int64 [4, n], of the counter blocks `block`, int64 [n]."""
    key_0, key_1 = seed & _WORD, (seed >> 32) & _WORD
    word_0, word_1 = block & _WORD, (block >> 32) & _WORD
    word_2 = torch.full_like(block, site & _WORD)
    word_3 = torch.full_like(block, (site >> 32) & _WORD)
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2^64, which keeps both halves of the unsigned product intact. Words 1 and 3 keep the
        # upper half with them: one mask after the exclusive or serves both.
        product_0, product_1 = word_0 * _MULTIPLIERS[0], word_2 * _MULTIPLIERS[1]
        word_0 = (product_1 >> 32).bitwise_xor_(word_1).bitwise_xor_(key_0).bitwise_and_(_WORD)
        word_2 = (product_0 >> 32).bitwise_xor_(word_3).bitwise_xor_(key_1).bitwise_and_(_WORD)
        word_1, word_3 = product_1, product_0
        key_0, key_1 = (key_0 + _KEY_STEPS[0]) & _WORD, (key_1 + _KEY_STEPS[1]) & _WORD
    return torch.stack((word_0, word_1 & _WORD, word_2, word_3 & _WORD))


def keep_mask(shape: Sequence[int], p: float, rng: Tensor, site: int) -> Tensor:
    """Return which elements dropout keeps: the reference that every kernel has to match bit for bit.

    Args:
        shape: [batch, ...], the shape of the tensor in the padded layout.
        p: probability of dropping an element.
        rng: int64 [2] = (seed, first_sample), on the device where the mask is wanted.
        site: number of this dropout in the model.

    Returns:
        bool, of `shape`.

    Raises:
        ValueError: no batch dimension.
    """
    check_batched(shape)
    num_elements = math.prod(shape)
    if num_elements == 0:
        return torch.empty(tuple(shape), dtype=torch.bool, device=rng.device)
    per_sample = num_elements // shape[0]
    first = rng[1] * per_sample
    threshold = drop_threshold(p)
    num_blocks = num_elements // 4 + 2
    keep = torch.empty(num_blocks * 4, dtype=torch.bool, device=rng.device)
    for start in range(0, num_blocks, _CHUNK_BLOCKS):
        stop = min(start + _CHUNK_BLOCKS, num_blocks)
        block = torch.arange(start, stop, dtype=torch.int64, device=rng.device) + torch.div(first, 4, rounding_mode="floor")
        words = _philox_words(block, site, rng[0])
        torch.ge(words.t(), threshold, out=keep[start * 4 : stop * 4].view(-1, 4))
    if per_sample % 4 == 0:  # then every first element starts a block, whatever the sample
        return keep[:num_elements].view(tuple(shape))
    # Row k of this view starts at element k: picking one needs no index per element, and no look at `first` from the host.
    return keep.unfold(0, num_elements, 1).index_select(0, (first % 4).view(1)).view(tuple(shape))
