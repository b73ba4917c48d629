"""State dicts from HuggingFace's BertForPreTraining to ours and back: the names are the same, the vocabulary's padding is not."""

from __future__ import annotations

import torch
from torch import Tensor

from models.bert import BertForPreTraining
from models.config import BertConfig

_WORD_EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
_PREDICTION_BIAS = "cls.predictions.bias"
# HuggingFace lists the tied decoder a second time: our key -> its names there.
_TIED = {
    "cls.predictions.decoder.weight": _WORD_EMBEDDINGS,
    "cls.predictions.decoder.bias": _PREDICTION_BIAS,
}
# A buffer that older versions kept in the state dict.
_IGNORED = ("bert.embeddings.position_ids",)


def _pad_rows(x: Tensor, num_rows: int) -> Tensor:
    return torch.cat([x, x.new_zeros(num_rows - x.shape[0], *x.shape[1:])])


def from_huggingface(state_dict: dict[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    """Return HuggingFace's weights under our names, the vocabulary padded with zeros.

    Raises:
        ValueError: keys that are missing or unexpected, or a tensor of another shape than `config` says.
    """
    result = {key: value for key, value in state_dict.items() if key not in _TIED and key not in _IGNORED}
    with torch.device("meta"):
        expected = BertForPreTraining(config).state_dict()
    missing, unexpected = sorted(expected.keys() - result.keys()), sorted(result.keys() - expected.keys())
    if missing or unexpected:
        raise ValueError(f"these weights are not BertForPreTraining's: missing {missing}, unexpected {unexpected}")
    for key in (_WORD_EMBEDDINGS, _PREDICTION_BIAS):
        if result[key].shape[0] == config.vocab_size:
            result[key] = _pad_rows(result[key], config.padded_vocab_size)
    wrong = [
        f"{key} {list(result[key].shape)} instead of {list(value.shape)}"
        for key, value in expected.items()
        if result[key].shape != value.shape
    ]
    if wrong:
        raise ValueError(f"the weights do not fit the configuration: {'; '.join(wrong)}")
    return result


def to_huggingface(state_dict: dict[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    """Return our weights under HuggingFace's names, the vocabulary's padding cut off, the tied decoder named twice."""
    result = dict(state_dict)
    for key in (_WORD_EMBEDDINGS, _PREDICTION_BIAS):
        result[key] = result[key][: config.vocab_size]
    return result | {tied: result[ours] for tied, ours in _TIED.items()}
