"""BERT for pretraining: post-LayerNorm encoder, tied decoder, masked-token and next-sentence heads (Devlin et al. 2018).

Modules and parameters carry HuggingFace's names, so a state_dict moves between the two. Activations are computed in one
dtype through explicit casts; the parameters may stay float32 and are then the masters.

Legend: B batch, S sequence, H hidden size, V padded vocabulary, P predictions per sequence, M predicted positions in all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tempo
from models.config import BertConfig
from models.inputs import check_inputs
from models.layers import BertSelfAttention, Dropout, Gelu, layer_norm

IGNORED_LABEL = -100


class BertEmbeddings(nn.Module):
    def __init__(self, config: BertConfig, site: int) -> None:
        super().__init__()
        # As in HuggingFace: a padding token learns nothing from being read.
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, config.hidden_size, padding_idx=0)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = layer_norm(config)
        self.dropout = Dropout(config, config.hidden_dropout, site)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, dtype: torch.dtype, rng: Tensor) -> Tensor:
        positions = self.position_embeddings.weight[: input_ids.shape[1]]
        x_BSH = self.word_embeddings(input_ids) + positions + self.token_type_embeddings(token_type_ids)
        return self.dropout(self.LayerNorm(x_BSH.to(dtype)), rng)


class BertOutputBlock(nn.Module):
    """Linear -> dropout -> add the residual -> LayerNorm: the end of the attention and of the MLP."""

    def __init__(self, config: BertConfig, width: int, site: int) -> None:
        super().__init__()
        self.dense = tempo.Linear(width, config.hidden_size)
        self.LayerNorm = layer_norm(config)
        self.dropout = Dropout(config, config.hidden_dropout, site)

    def forward(self, x: Tensor, residual_BSH: Tensor, rng: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(x).view(residual_BSH.shape), rng) + residual_BSH)


class BertAttention(nn.Module):
    def __init__(self, config: BertConfig, site: int) -> None:
        super().__init__()
        self.self = BertSelfAttention(config, site)
        self.output = BertOutputBlock(config, config.hidden_size, site + 1)

    def forward(self, x_BSH: Tensor, mask_BS: Tensor | None, rng: Tensor) -> Tensor:
        return self.output(self.self(x_BSH, mask_BS, rng), x_BSH, rng)


class BertIntermediate(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = tempo.Linear(config.hidden_size, config.intermediate_size)
        self.gelu = Gelu(config)

    def forward(self, x_BSH: Tensor) -> Tensor:
        # One row a token: a matrix product's result is then no view, and GELU can overwrite it.
        return self.gelu(self.dense(x_BSH.flatten(0, 1)))


class BertLayer(nn.Module):
    def __init__(self, config: BertConfig, site: int) -> None:
        super().__init__()
        self.attention = BertAttention(config, site)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutputBlock(config, config.intermediate_size, site + 2)

    def forward(self, x_BSH: Tensor, mask_BS: Tensor | None, rng: Tensor) -> Tensor:
        x_BSH = self.attention(x_BSH, mask_BS, rng)
        return self.output(self.intermediate(x_BSH), x_BSH, rng)


class BertEncoder(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        # Dropout sites: 0 the embeddings, then three a layer.
        self.layer = nn.ModuleList(BertLayer(config, site=1 + 3 * i) for i in range(config.num_layers))
        self.activation_checkpointing = config.activation_checkpointing
        self.draws_from_torch = not config.uses_philox

    def forward(self, x_BSH: Tensor, mask_BS: Tensor | None, rng: Tensor) -> Tensor:
        for layer in self.layer:
            if self.activation_checkpointing and self.training:
                x_BSH = checkpoint(layer, x_BSH, mask_BS, rng, use_reentrant=False, preserve_rng_state=self.draws_from_torch)
            else:
                x_BSH = layer(x_BSH, mask_BS, rng)
        return x_BSH


class BertPooler(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = tempo.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_BSH: Tensor) -> Tensor:
        return torch.tanh(self.dense(x_BSH[:, 0]))


class BertModel(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(config, site=0)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config)

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor, mask_BS: Tensor | None, dtype: torch.dtype, rng: Tensor
    ) -> tuple[Tensor, Tensor]:
        x_BSH = self.embeddings(input_ids, token_type_ids, dtype, rng)
        x_BSH = self.encoder(x_BSH, mask_BS, rng)
        return x_BSH, self.pooler(x_BSH)


class BertPredictionHeadTransform(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = tempo.Linear(config.hidden_size, config.hidden_size)
        self.gelu = Gelu(config)
        self.LayerNorm = layer_norm(config)

    def forward(self, x_MH: Tensor) -> Tensor:
        return self.LayerNorm(self.gelu(self.dense(x_MH)))


class BertLMPredictionHead(nn.Module):
    """Hidden states -> logits over the padded vocabulary, through the word embeddings transposed."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = BertPredictionHeadTransform(config)
        self.bias = nn.Parameter(torch.zeros(config.padded_vocab_size))

    def forward(self, x_MH: Tensor, word_embeddings_VH: Tensor) -> Tensor:
        return tempo.linear(self.transform(x_MH), word_embeddings_VH, self.bias)


class BertPreTrainingHeads(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(config)
        self.seq_relationship = tempo.Linear(config.hidden_size, 2)


@dataclass
class BertOutput:
    """What the model returns; tensors, so that nothing waits for the device.

    Attributes:
        loss: mlm_loss + nsp_loss, whichever were asked for; None without labels.
        mlm_loss, nsp_loss: means over the predicted positions and the sequences, float32; 0 where there is none.
        mlm_loss_sum, nsp_loss_sum: the sums, float32.
        num_masked: predicted positions, int64.
        num_mlm_correct, num_nsp_correct: predictions that hit, int64.
        prediction_logits: [B, S, vocab_size] without labels, [M, vocab_size] (or [B * P, vocab_size]) with.
        seq_relationship_logits: [B, 2].
    """

    prediction_logits: Tensor
    seq_relationship_logits: Tensor
    loss: Tensor | None = None
    mlm_loss: Tensor | None = None
    mlm_loss_sum: Tensor | None = None
    num_masked: Tensor | None = None
    num_mlm_correct: Tensor | None = None
    nsp_loss: Tensor | None = None
    nsp_loss_sum: Tensor | None = None
    num_nsp_correct: Tensor | None = None


class BertForPreTraining(nn.Module):
    """BERT with both pretraining heads.

    Args:
        config: its shape and the way its layers are computed.
        compute_dtype: dtype of activations and matrix products; None takes the parameters' own.
    """

    def __init__(self, config: BertConfig, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        self.bert = BertModel(config)
        self.cls = BertPreTrainingHeads(config)
        self.sample_counter = tempo.SampleCounter()
        self.apply(self._initialise)
        with torch.no_grad():
            self.bert.embeddings.word_embeddings.weight[config.vocab_size :].zero_()

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        *,
        masked_positions: Tensor | None = None,
        rng: Tensor | None = None,
    ) -> BertOutput:
        """Run the encoder and the heads.

        Args:
            input_ids: int [B, S]; ids at or above vocab_size are not checked.
            token_type_ids: int [B, S], 0 for the first segment; None is all 0.
            attention_mask: bool or int [B, S], true = a real token; None is all true.
            labels: int64 [B, S] with -100 where nothing is predicted; or [B, P] beside `masked_positions`.
            next_sentence_label: int64 [B], 0 = the second segment follows the first, 1 = it is random.
            masked_positions: int64 [B, P], the places to decode; unused ones have label -100 and any valid place. Fixed
                shapes: nothing waits for the device.
            rng: int64 [2] = (seed, first_sample) for Philox dropout; None counts the model's own samples.

        Raises:
            ValueError: shapes that do not fit each other or the model.
        """
        limit = self.config.max_position_embeddings
        check_inputs(limit, input_ids, token_type_ids, attention_mask, labels, next_sentence_label, masked_positions)
        dtype = self.compute_dtype or self.bert.embeddings.word_embeddings.weight.dtype
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        if rng is None:
            rng = self._next_rng(input_ids)
        mask_BS = None if attention_mask is None else attention_mask.bool()
        x_BSH, pooled_BH = self.bert(input_ids, token_type_ids, mask_BS, dtype, rng)
        return self._heads(x_BSH, pooled_BH, labels, masked_positions, next_sentence_label)

    def _heads(
        self,
        x_BSH: Tensor,
        pooled_BH: Tensor,
        labels: Tensor | None,
        masked_positions: Tensor | None,
        next_sentence_label: Tensor | None,
    ) -> BertOutput:
        # One row a position: GELU and the next lines write into a matrix product's result, which must not be a view.
        x_MH = x_BSH.flatten(0, 1)
        if labels is not None:
            x_MH, labels = _gather_predicted(x_BSH, labels, masked_positions)
        logits_MV = self.cls.predictions(x_MH, self.bert.embeddings.word_embeddings.weight)
        vocab_size = self.config.vocab_size
        if vocab_size < logits_MV.shape[-1]:
            # Padding rows of the vocabulary take no part: not in the softmax, and their gradient is zero.
            logits_MV[:, vocab_size:] = torch.finfo(logits_MV.dtype).min
        prediction_logits = logits_MV[:, :vocab_size]
        if labels is None:
            prediction_logits = prediction_logits.view(*x_BSH.shape[:2], vocab_size)
        output = BertOutput(prediction_logits, self.cls.seq_relationship(pooled_BH))
        if labels is not None:
            output.mlm_loss_sum, output.num_masked, output.num_mlm_correct = _cross_entropy(logits_MV, labels)
            output.mlm_loss = output.loss = output.mlm_loss_sum / output.num_masked.clamp(min=1)
        if next_sentence_label is not None:
            output.nsp_loss_sum, count, output.num_nsp_correct = _cross_entropy(
                output.seq_relationship_logits, next_sentence_label
            )
            output.nsp_loss = output.nsp_loss_sum / count.clamp(min=1)
            output.loss = output.nsp_loss if output.loss is None else output.loss + output.nsp_loss
        return output

    def _next_rng(self, input_ids: Tensor) -> Tensor:
        config = self.config
        draws = self.training and config.uses_philox and (config.hidden_dropout > 0 or config.attention_dropout > 0)
        if not draws:
            return torch.zeros(2, dtype=torch.int64, device=input_ids.device)
        return self.sample_counter.next(input_ids.shape[0], input_ids.device)


def _gather_predicted(x_BSH: Tensor, labels: Tensor, masked_positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """Pick the hidden states to decode: [M, H] and their labels [M]."""
    hidden = x_BSH.shape[-1]
    if masked_positions is None:
        chosen = labels.reshape(-1) != IGNORED_LABEL
        return x_BSH.reshape(-1, hidden)[chosen], labels.reshape(-1)[chosen]
    index = masked_positions[:, :, None].expand(-1, -1, hidden)
    return x_BSH.gather(1, index).view(-1, hidden), labels.reshape(-1)


def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the losses (float32), how many labels count, how many predictions hit."""
    loss_sum = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED_LABEL, reduction="sum")
    counted = labels != IGNORED_LABEL
    hits = (logits.detach().argmax(-1) == labels) & counted
    return loss_sum, counted.sum(), hits.sum()
