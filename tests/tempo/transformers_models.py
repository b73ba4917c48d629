"""Small random models of transformers, as they are and converted, and what tests run them on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import tempo

transformers = pytest.importorskip("transformers")

VOCAB, LENGTH = 99, 13
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": VOCAB}


def bert(**fields: object) -> nn.Module:
    return transformers.BertForPreTraining(transformers.BertConfig(**SMALL | fields))


def roberta(**fields: object) -> nn.Module:
    return transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SMALL | {"max_position_embeddings": 40} | fields))


def gpt2(**fields: object) -> nn.Module:
    config = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config | fields))


MODELS = {"bert": bert, "roberta": roberta, "gpt2": gpt2}
NO_DROPOUT = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "roberta": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def batch(padded: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCAB, (3, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    result = model(**inputs)
    return getattr(result, "prediction_logits", None) if hasattr(result, "prediction_logits") else result.logits


def loss_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return logits(model, inputs)[inputs["attention_mask"].bool()].float().square().mean()


def pair(kind: str, dtype: torch.dtype = torch.float32, **fields: object) -> tuple[nn.Module, nn.Module]:
    original = MODELS[kind](**fields).to(dtype)
    converted = copy.deepcopy(original)
    tempo.convert(converted)
    return original, converted
