"""Sizes, derived values, and every mistake a user can make in the model's configuration."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from models.bert import BertForPreTraining
from models.config import PRESETS, BertConfig


def num_parameters(config: BertConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in BertForPreTraining(config).parameters())


@pytest.mark.parametrize("layers", ["torch", "tempo"])
@pytest.mark.parametrize("vocab_size", [30522, 30528])
@pytest.mark.parametrize(("preset", "expected"), [("bert_large", 336_232_258), ("bert_base", 110_111_042)])
def test_published_sizes_have_exactly_the_published_number_of_parameters(
    preset: str, expected: int, vocab_size: int, layers: str
) -> None:
    assert num_parameters(BertConfig.preset(preset, vocab_size=vocab_size, layers=layers)) == expected


@pytest.mark.parametrize(
    ("preset", "num_layers", "hidden_size", "num_heads"),
    [
        ("bert_tiny", 2, 128, 2),
        ("bert_mini", 4, 256, 4),
        ("bert_small", 4, 512, 8),
        ("bert_medium", 8, 512, 8),
        ("bert_base", 12, 768, 12),
        ("bert_large", 24, 1024, 16),
    ],
)
def test_presets(preset: str, num_layers: int, hidden_size: int, num_heads: int) -> None:
    config = BertConfig.preset(preset)
    assert (config.num_layers, config.hidden_size, config.num_heads) == (num_layers, hidden_size, num_heads)
    assert config.intermediate_size == 4 * hidden_size
    assert config.vocab_size == 30522
    assert config.max_position_embeddings == 512
    assert preset in PRESETS


def test_preset_takes_overrides() -> None:
    config = BertConfig.preset("bert_tiny", num_layers=3, layers="tempo")
    assert (config.num_layers, config.hidden_size, config.layers) == (3, 128, "tempo")


@pytest.mark.parametrize(("vocab_size", "padded"), [(1, 8), (30522, 30528), (30528, 30528), (30529, 30536)])
def test_vocabulary_is_padded_to_a_multiple_of_8(vocab_size: int, padded: int) -> None:
    assert BertConfig(vocab_size=vocab_size).padded_vocab_size == padded


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BertConfig().num_layers = 3  # type: ignore[misc]


@pytest.mark.parametrize("technique", ["inplace_gelu", "inplace_layer_norm", "dropout_recomputation"])
def test_each_technique_follows_layers_unless_switched_alone(technique: str) -> None:
    for layers in ("torch", "tempo"):
        assert getattr(BertConfig(layers=layers), f"uses_{technique}") is (layers == "tempo")
        for switch in (True, False):
            assert getattr(BertConfig(layers=layers, **{technique: switch}), f"uses_{technique}") is switch
    others = {"inplace_gelu", "inplace_layer_norm", "dropout_recomputation"} - {technique}
    alone = BertConfig(layers="torch", **{technique: True})
    assert not any(getattr(alone, f"uses_{other}") for other in others)


def test_auto_generator_is_philox_only_where_dropout_is_recomputed() -> None:
    assert not BertConfig(layers="torch").uses_philox
    assert BertConfig(layers="tempo").uses_philox
    assert not BertConfig(layers="tempo", dropout_recomputation=False).uses_philox
    assert BertConfig(layers="torch", dropout_recomputation=True).uses_philox
    assert BertConfig(layers="torch", dropout_generator="philox").uses_philox


COUNTS = [
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
]


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("field", COUNTS)
def test_counts_below_1_are_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"model\.{field} must be at least 1, got {value}"):
        BertConfig(**{field: value})


@pytest.mark.parametrize("field", ["hidden_dropout", "attention_dropout"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_dropout_outside_0_to_1_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"model\.{field} must lie in \[0, 1\], got {value}"):
        BertConfig(**{field: value})


@pytest.mark.parametrize("field", ["layer_norm_eps", "initializer_range"])
@pytest.mark.parametrize("value", [-1e-12, float("nan")])
def test_negative_eps_and_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"model\.{field} must be at least 0"):
        BertConfig(**{field: value})


def test_hidden_size_must_be_a_multiple_of_the_heads() -> None:
    with pytest.raises(ValueError, match=r"model\.hidden_size \(768\) must be a multiple of model\.num_heads \(11\)"):
        BertConfig(num_heads=11)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("layers", "tmepo", r"must be one of torch, tempo, got 'tmepo' \(did you mean 'tempo'\?\)"),
        ("gelu", "tahn", r"must be one of erf, tanh, got 'tahn' \(did you mean 'tanh'\?\)"),
        ("gelu", "relu", r"must be one of erf, tanh, got 'relu'"),
        ("dropout_generator", "philx", r"got 'philx' \(did you mean 'philox'\?\)"),
        ("gelu_side_bits", 2, r"must be one of 1, 4, got 2"),
    ],
)
def test_unknown_choices_are_refused_with_a_suggestion(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=rf"model\.{field} {message}" if message.startswith("must") else message):
        BertConfig(**{field: value})


def test_unknown_preset_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"bert_tiny, .*bert_large, got 'bert-large' \(did you mean 'bert_large'\?\)"):
        BertConfig.preset("bert-large")


def test_unknown_field_of_a_preset_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"model\.num_layer is not a field of the model \(did you mean 'num_layers'\?\)"):
        BertConfig.preset("bert_tiny", num_layer=3)


@pytest.mark.parametrize("fields", [{"layers": "tempo"}, {"layers": "torch", "dropout_recomputation": True}])
def test_pytorchs_generator_cannot_recompute_dropout(fields: dict) -> None:
    with pytest.raises(ValueError, match=r"model\.dropout_generator 'torch' .* use 'philox' or 'auto'"):
        BertConfig(dropout_generator="torch", **fields)
