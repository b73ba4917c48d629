"""State dicts from HuggingFace's BertForPreTraining to ours and back: the names are the same, the vocabulary's padding is not."""

from __future__ import annotations

import torch
from torch import Tensor

from models.bert import BertForPreTraining
from models.config import BertConfig

_WORD_EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
_PREDICTION_BIAS = "cls.predictions.bias"
# HuggingFace lists the tied decoder a second time: its key there -> our key.
_TIED = {
    "cls.predictions.decoder.weight": _WORD_EMBEDDINGS,
    "cls.predictions.decoder.bias": _PREDICTION_BIAS,
}
_VOCABULARY_KEYS = (_WORD_EMBEDDINGS, _PREDICTION_BIAS)
# A buffer that older versions kept in the state dict.
_IGNORED = ("bert.embeddings.position_ids",)


def _pad_rows(x: Tensor, num_rows: int) -> Tensor:
    return torch.cat([x, x.new_zeros(num_rows - x.shape[0], *x.shape[1:])])


def _cut_vocabulary(state_dict: dict[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    return {key: value[: config.vocab_size] if key in _VOCABULARY_KEYS else value for key, value in state_dict.items()}


def _expected(config: BertConfig) -> dict[str, Tensor]:
    with torch.device("meta"):
        return BertForPreTraining(config).state_dict()


def _check_keys(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    missing, unexpected = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or unexpected:
        raise ValueError(f"these weights are not BertForPreTraining's: missing {missing}, unexpected {unexpected}")


def _check_shapes(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    wrong = [
        f"{key} {list(found[key].shape)} instead of {list(value.shape)}"
        for key, value in expected.items()
        if found[key].shape != value.shape
    ]
    if wrong:
        raise ValueError(f"the weights do not fit the configuration: {'; '.join(wrong)}")


def from_huggingface(state_dict: dict[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    """Return HuggingFace's weights under our names, the vocabulary padded with zeros.

    Raises:
        ValueError: keys that are missing or unexpected, a tensor of another shape than `config` says, or a decoder that
            is not tied to the word embeddings.
    """
    result = {key: value for key, value in state_dict.items() if key not in _TIED and key not in _IGNORED}
    expected = _expected(config)
    _check_keys(result, expected)
    _check_shapes(result, _cut_vocabulary(expected, config))
    for tied, ours in _TIED.items():
        if tied in state_dict and not torch.equal(state_dict[tied], result[ours]):
            raise ValueError(f"{tied} differs from {ours}; a decoder of its own is not supported, the two must be tied")
    for key in _VOCABULARY_KEYS:
        result[key] = _pad_rows(result[key], config.padded_vocab_size)
    return result


def to_huggingface(state_dict: dict[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    """Return our weights under HuggingFace's names, the vocabulary's padding cut off, the tied decoder named twice.

    Raises:
        ValueError: keys that are missing or unexpected, or a tensor of another shape than `config` says.
    """
    expected = _expected(config)
    _check_keys(state_dict, expected)
    _check_shapes(state_dict, expected)
    result = _cut_vocabulary(state_dict, config)
    return result | {tied: result[ours] for tied, ours in _TIED.items()}
