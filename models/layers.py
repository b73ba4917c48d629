"""The layers that BERT is put together from, each in PyTorch's and in Tempo's way; the choice is made here and nowhere else.

Legend: B batch, S sequence, H hidden size, N heads, D width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tempo
from models.config import BertConfig
from tempo.layer_norm import num_unsafe_columns


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` for float32 parameters and input of any dtype."""

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight.to(input.dtype), self.bias.to(input.dtype), self.eps)


def layer_norm(config: BertConfig) -> nn.LayerNorm:
    kind = tempo.InplaceLayerNorm if config.uses_inplace_layer_norm else LayerNorm
    return kind(config.hidden_size, eps=config.layer_norm_eps)


def most_unsafe_columns(model: nn.Module, dtype: torch.dtype) -> int:
    """How many columns the worst of the model's in-place LayerNorms cannot rebuild well from an output of `dtype`.

    On a GPU `tempo.layer_norm.NUM_EXACT_COLUMNS` of them are exact all the same. Waits for the device.
    """
    norms = [module for module in model.modules() if isinstance(module, tempo.InplaceLayerNorm)]
    counts = [num_unsafe_columns(norm.weight, norm.bias, dtype) for norm in norms]
    return int(torch.stack(counts).max()) if counts else 0


class Gelu(nn.Module):
    """GELU as the configuration wants it."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.approximate = "tanh" if config.gelu == "tanh" else "none"
        self.inplace, self.side_bits = config.uses_inplace_gelu, config.gelu_side_bits

    def forward(self, x: Tensor) -> Tensor:
        if self.inplace:
            # The input is a linear layer's fresh output, which nothing else needs.
            return tempo.gelu(x, self.approximate, self.side_bits, inplace=torch.is_grad_enabled() and x.requires_grad)
        return F.gelu(x, approximate=self.approximate)


def _masked_by_philox(x: Tensor, p: float, rng: Tensor, site: int) -> Tensor:
    """Dropout that keeps its mask, as PyTorch's does, but draws the bits that Tempo's layers draw."""
    # Through the op, which a compiled kernel may serve and torch.compile need not look into.
    keep = torch.ops.tempo.dropout(torch.ones_like(x), p, rng, site) != 0
    return torch.where(keep, x * (1.0 / (1.0 - p) if p < 1.0 else 0.0), torch.zeros((), dtype=x.dtype, device=x.device))


class Dropout(nn.Module):
    """Dropout number `site` of the model.

    x [B, ...] -> the same; `rng` is int64 [2] = (seed, first_sample), used where the masks come from Philox.
    """

    def __init__(self, config: BertConfig, p: float, site: int) -> None:
        super().__init__()
        self.p, self.site = p, site
        self.recompute, self.philox = config.uses_dropout_recomputation, config.uses_philox

    def forward(self, x: Tensor, rng: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        if self.recompute:
            return tempo.dropout(x, self.p, rng, self.site)
        if self.philox:
            return _masked_by_philox(x, self.p, rng, self.site)
        return F.dropout(x, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, site={self.site}"


class BertSelfAttention(nn.Module):
    """Multi-head attention over the unpadded keys."""

    def __init__(self, config: BertConfig, site: int) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query = tempo.Linear(config.hidden_size, config.hidden_size)
        self.key = tempo.Linear(config.hidden_size, config.hidden_size)
        self.value = tempo.Linear(config.hidden_size, config.hidden_size)
        self.dropout = Dropout(config, config.attention_dropout, site)

    def _heads(self, x_BSH: Tensor) -> Tensor:
        batch, length, _ = x_BSH.shape
        return x_BSH.view(batch, length, self.num_heads, -1).transpose(1, 2)

    def forward(self, x_BSH: Tensor, mask_BS: Tensor | None, rng: Tensor) -> Tensor:
        query_BNSD, key_BNSD, value_BNSD = (self._heads(f(x_BSH)) for f in (self.query, self.key, self.value))
        if self.dropout.recompute:
            context_BNSD = tempo.attention(
                query_BNSD,
                key_BNSD,
                value_BNSD,
                mask_BS,
                p=self.dropout.p,
                rng=rng,
                site=self.dropout.site,
                training=self.training,
            )
        else:
            context_BNSD = self._attend(query_BNSD, key_BNSD, value_BNSD, mask_BS, rng)
        return context_BNSD.transpose(1, 2).reshape(x_BSH.shape)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask_BS: Tensor | None, rng: Tensor) -> Tensor:
        """The paper's baseline: softmax, dropout, matmul, each keeping what PyTorch keeps."""
        scores_BNSS = torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(-2, -1))
        if mask_BS is not None:
            # Half the dtype's minimum: the whole of it plus a negative score overflows to -inf in float16, and a row of -inf
            # is NaN. Adding keeps nothing for the backward pass.
            masked = torch.where(mask_BS, 0.0, 0.5 * torch.finfo(scores_BNSS.dtype).min).to(scores_BNSS.dtype)
            scores_BNSS = scores_BNSS + masked[:, None, None, :]
        return torch.matmul(self.dropout(torch.softmax(scores_BNSS, dim=-1), rng), value)
