"""A small model whose every parameter matters, and a batch with padding, shared by the tests of the models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.bert import BertForPreTraining
from models.config import BertConfig

VOCAB_SIZE = 83  # no multiple of 8: five padded rows
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 40,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two runs of the same sum must add in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def randomise(model: nn.Module, seed: int = 1) -> None:
    """Give biases and LayerNorms values that are not their neutral initial ones; padded rows stay 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            if name == "cls.predictions.bias" or name.endswith("word_embeddings.weight"):
                noise[VOCAB_SIZE:] = 0.0
            parameter.add_(noise)


@pytest.fixture
def small_model() -> Callable[..., BertForPreTraining]:
    def build(*, compute_dtype: torch.dtype | None = None, random: bool = True, **fields: Any) -> BertForPreTraining:
        torch.manual_seed(0)
        model = BertForPreTraining(BertConfig(**{**SIZES, **fields}), compute_dtype)
        if random:
            randomise(model)
        return model

    return build


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Eight sequences of 20: whole, short, of one token and wholly padded; labels as [B, S]."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([20, 13, 1, 0, 20, 7, 19, 2])
    input_ids = torch.randint(0, VOCAB_SIZE, (8, 20), generator=generator)
    inside = torch.arange(20) < lengths[:, None]
    chosen = torch.rand(8, 20, generator=generator) < 0.2
    return {
        "input_ids": input_ids,
        "token_type_ids": torch.randint(0, 2, (8, 20), generator=generator),
        "attention_mask": inside,
        "labels": torch.where(chosen, torch.randint(0, VOCAB_SIZE, (8, 20), generator=generator), -100),
        "next_sentence_label": torch.randint(0, 2, (8,), generator=generator),
    }


@pytest.fixture
def gathered_batch(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same batch with labels as [B, P] beside masked_positions, padded with label -100 at place 0."""
    labels = batch["labels"]
    num_predictions = int((labels != -100).sum(1).max()) + 1
    positions = torch.zeros(8, num_predictions, dtype=torch.int64)
    gathered = torch.full((8, num_predictions), -100)
    for row in range(8):
        places = (labels[row] != -100).nonzero().flatten()
        positions[row, : len(places)] = places
        gathered[row, : len(places)] = labels[row, places]
    return {**batch, "labels": gathered, "masked_positions": positions}


@pytest.fixture
def gradients() -> Callable[[nn.Module], dict[str, Tensor]]:
    def collect(model: nn.Module) -> dict[str, Tensor]:
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}

    return collect
