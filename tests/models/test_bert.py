"""The model apart from dropout and 16-bit types: initial weights, losses, counts, shapes, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.bert import BertForPreTraining

Build = Callable[..., BertForPreTraining]
MODES = [
    {"layers": "torch"},
    {"layers": "tempo"},
    {"layers": "tempo", "gelu_side_bits": 4},
    {"inplace_gelu": True},
    {"inplace_layer_norm": True},
    {"dropout_recomputation": True},
    {"layers": "tempo", "inplace_gelu": False},
]
LAYERS = ["torch", "tempo"]
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def name_of(mode: dict) -> str:
    return "-".join(f"{key}={value}" for key, value in mode.items())


@pytest.mark.parametrize("mode", MODES, ids=name_of)
def test_every_mode_starts_with_the_same_names_and_weights(small_model: Build, mode: dict) -> None:
    baseline, model = small_model(random=False), small_model(random=False, **mode)
    assert list(baseline.state_dict()) == list(model.state_dict())
    for name, value in baseline.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


@pytest.mark.parametrize("mode", MODES, ids=name_of)
def test_layer_norms_are_recognised_by_their_class_in_every_mode(small_model: Build, mode: dict) -> None:
    model = small_model(**mode)
    found = [name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    assert len(found) == 1 + 2 * 2 + 1
    assert all(name.endswith("LayerNorm") for name in found)


def test_initial_weights(small_model: Build) -> None:
    model = small_model(random=False, hidden_size=256, intermediate_size=1024)
    for name, value in model.named_parameters():
        if "LayerNorm.weight" in name:
            assert (value == 1).all(), name
        elif name.endswith("bias"):
            assert (value == 0).all(), name
        else:
            value = value[: model.config.vocab_size] if "word_embeddings" in name else value
            tolerance = 5 * 0.02 / value.numel() ** 0.5
            assert abs(value.mean().item()) < tolerance, name
            assert abs(value.std().item() - 0.02) < tolerance, name


def test_initializer_range_is_used(small_model: Build) -> None:
    narrow, wide = small_model(random=False), small_model(random=False, initializer_range=0.2)
    name = "bert.encoder.layer.0.intermediate.dense.weight"
    assert torch.allclose(10 * narrow.state_dict()[name], wide.state_dict()[name])


@pytest.mark.parametrize("layers", LAYERS)
def test_padding_of_the_vocabulary_is_0_and_stays_0_in_training(
    small_model: Build, batch: dict[str, Tensor], layers: str
) -> None:
    model = small_model(layers=layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    assert (model.bert.embeddings.word_embeddings.weight[83:] == 0).all()
    assert (model.cls.predictions.bias[83:] == 0).all()
    assert (model.bert.embeddings.word_embeddings.weight[:83] != 0).all()


def test_the_decoder_is_the_word_embedding(small_model: Build, batch: dict[str, Tensor]) -> None:
    model = small_model(**NO_DROPOUT).eval()
    before = model(batch["input_ids"]).prediction_logits
    with torch.no_grad():
        absent = (torch.arange(1, 83)[:, None, None] != batch["input_ids"]).all((1, 2)).nonzero()[0].item() + 1
        model.bert.embeddings.word_embeddings.weight[absent] += 1.0  # a word that the input does not use
    changed = (model(batch["input_ids"]).prediction_logits - before).abs().amax((0, 1))
    assert changed[absent] > 0
    assert (changed[torch.arange(83) != absent] == 0).all()


@pytest.mark.parametrize("layers", LAYERS)
def test_losses_and_counts_are_those_of_the_logits(small_model: Build, batch: dict[str, Tensor], layers: str) -> None:
    model = small_model(layers=layers, **NO_DROPOUT)
    with torch.no_grad():
        output = model(**batch)
        inputs = {key: batch[key] for key in ("input_ids", "token_type_ids", "attention_mask")}
        logits = model(**inputs).prediction_logits
    labels, next_sentence_label = batch["labels"], batch["next_sentence_label"]
    chosen = labels != -100
    assert output.num_masked == chosen.sum()
    assert torch.allclose(output.prediction_logits, logits[chosen], atol=1e-6)
    assert torch.allclose(output.mlm_loss, F.cross_entropy(logits[chosen], labels[chosen]), atol=1e-6)
    assert torch.allclose(output.mlm_loss_sum, output.mlm_loss * chosen.sum())
    assert output.num_mlm_correct == (logits[chosen].argmax(-1) == labels[chosen]).sum()
    relation = output.seq_relationship_logits
    assert torch.allclose(output.nsp_loss, F.cross_entropy(relation, next_sentence_label), atol=1e-6)
    assert torch.allclose(output.nsp_loss_sum, output.nsp_loss * 8)
    assert output.num_nsp_correct == (relation.argmax(-1) == next_sentence_label).sum()
    assert torch.equal(output.loss, output.mlm_loss + output.nsp_loss)


@pytest.mark.parametrize("layers", LAYERS)
def test_masked_positions_give_the_loss_and_gradients_of_full_labels(
    small_model: Build, batch: dict, gathered_batch: dict, gradients: Callable, layers: str
) -> None:
    model = small_model(layers=layers, **NO_DROPOUT)
    full = model(**batch)
    full.loss.backward()
    expected = gradients(model)
    model.zero_grad()
    gathered = model(**gathered_batch)
    gathered.loss.backward()
    for field in ("loss", "mlm_loss_sum", "num_masked", "num_mlm_correct", "nsp_loss_sum"):
        assert torch.allclose(getattr(full, field), getattr(gathered, field), rtol=1e-6), field
    assert gathered.prediction_logits.shape == (gathered_batch["labels"].numel(), 83)
    for name, gradient in gradients(model).items():
        assert torch.allclose(gradient, expected[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("layers", LAYERS)
def test_gradients_through_all_logits_equal_those_of_the_baseline(
    small_model: Build, batch: dict, gradients: Callable, layers: str
) -> None:
    """Without labels every position is decoded; a [B, S, V] result must not disturb the in-place layers."""
    results = []
    for kind in ("torch", layers):
        model = small_model(layers=kind, **NO_DROPOUT)
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).prediction_logits
        assert logits.shape == (8, 20, 83)
        logits.square().mean().backward()
        results.append(gradients(model))
    for name, expected in results[0].items():
        assert torch.allclose(results[1][name], expected, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("num_predictions", [None, 0, 3], ids=["full_labels", "no_positions", "unused_positions"])
def test_a_batch_with_nothing_to_predict_has_loss_0_and_finite_gradients(
    small_model: Build, batch: dict, layers: str, num_predictions: int | None
) -> None:
    model = small_model(layers=layers)
    if num_predictions is None:
        batch["labels"] = torch.full((8, 20), -100)
    else:
        batch["labels"] = torch.full((8, num_predictions), -100)
        batch["masked_positions"] = torch.zeros(8, num_predictions, dtype=torch.int64)
    output = model(**batch)
    output.loss.backward()
    assert (output.mlm_loss, output.mlm_loss_sum, output.num_masked, output.num_mlm_correct) == (0, 0, 0, 0)
    assert torch.equal(output.loss, output.nsp_loss)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_next_sentence_labels_of_minus_100_do_not_count(small_model: Build, batch: dict) -> None:
    model = small_model(**NO_DROPOUT)
    batch["next_sentence_label"] = torch.full((8,), -100)
    output = model(**batch)
    assert (output.nsp_loss, output.num_nsp_correct) == (0, 0)
    assert torch.equal(output.loss, output.mlm_loss)


def test_the_next_sentence_loss_is_the_mean_over_the_labels_that_count(small_model: Build, batch: dict) -> None:
    model = small_model(**NO_DROPOUT)
    label = batch["next_sentence_label"] = torch.tensor([-100, 0, 1, -100, 1, -100, 0, -100])
    output = model(**batch)
    kept = label != -100
    expected = F.cross_entropy(output.seq_relationship_logits[kept], label[kept])
    assert torch.allclose(output.nsp_loss, expected, atol=1e-6)
    assert torch.allclose(output.nsp_loss_sum, 4 * expected, atol=1e-6)


def test_each_loss_can_be_asked_for_alone(small_model: Build, batch: dict) -> None:
    model = small_model(**NO_DROPOUT)
    labels, next_sentence_label = batch.pop("labels"), batch.pop("next_sentence_label")
    neither = model(**batch)
    assert (neither.loss, neither.mlm_loss, neither.nsp_loss) == (None, None, None)
    only_words = model(**batch, labels=labels)
    assert only_words.nsp_loss is None
    assert torch.equal(only_words.loss, only_words.mlm_loss)
    only_sentences = model(**batch, next_sentence_label=next_sentence_label)
    assert only_sentences.mlm_loss is None
    assert torch.equal(only_sentences.loss, only_sentences.nsp_loss)
    assert only_sentences.prediction_logits.shape == (8, 20, 83)


@pytest.mark.parametrize("layers", LAYERS)
def test_micro_batches_sum_to_the_whole_batch(small_model: Build, batch: dict, gradients: Callable, layers: str) -> None:
    """Uneven masked counts: the sums, not the means, of micro-batches make the global mean."""
    model = small_model(layers=layers, **NO_DROPOUT)
    whole = model(**batch)
    whole.loss.backward()
    expected = gradients(model)
    model.zero_grad()
    total = 0.0
    for start, stop in ((0, 3), (3, 4), (4, 8)):
        part = model(**{key: value[start:stop] for key, value in batch.items()})
        loss = part.mlm_loss_sum / whole.num_masked + part.nsp_loss_sum / 8
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(whole.loss.item(), rel=1e-6)
    for name, gradient in gradients(model).items():
        assert torch.allclose(gradient, expected[name], rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("layers", LAYERS)
def test_padded_tokens_do_not_influence_the_others(small_model: Build, batch: dict, layers: str, mask_dtype: torch.dtype) -> None:
    model = small_model(layers=layers).eval()
    mask = batch["attention_mask"]
    changed = torch.where(mask, batch["input_ids"], (batch["input_ids"] + 1) % 83)
    with torch.no_grad():
        first, second = (
            model(ids, attention_mask=mask.to(mask_dtype)).prediction_logits for ids in (batch["input_ids"], changed)
        )
    assert torch.equal(first[mask], second[mask])
    assert not torch.equal(first, second)


def test_labels_and_positions_may_be_non_contiguous(small_model: Build, batch: dict) -> None:
    model = small_model(**NO_DROPOUT)
    expected = model(**batch).loss
    strided = {key: value.t().contiguous().t() if value.dim() == 2 else value for key, value in batch.items()}
    assert not strided["labels"].is_contiguous()
    assert torch.equal(model(**strided).loss, expected)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": zeros(20)}, r"input_ids must be \[batch, sequence\], got \[20\]"),
        ({"input_ids": zeros(2, 41)}, r"the sequence has 41 tokens, but model\.max_position_embeddings is 40"),
        ({"token_type_ids": zeros(2, 7)}, r"token_type_ids must be \[2, 8\] as input_ids, got \[2, 7\]"),
        ({"attention_mask": zeros(1, 8)}, r"attention_mask must be \[2, 8\] as input_ids, got \[1, 8\]"),
        ({"labels": zeros(2, 3)}, r"labels must be \[2, 8\] as input_ids; .* give masked_positions too, got \[2, 3\]"),
        ({"next_sentence_label": zeros(2, 1)}, r"next_sentence_label must be \[2\] one for each sequence, got \[2, 1\]"),
        ({"masked_positions": zeros(2, 3)}, r"masked_positions were given without labels"),
        ({"masked_positions": zeros(2, 3), "labels": zeros(2, 8)}, r"labels must be \[2, 3\] as masked_positions, got \[2, 8\]"),
        ({"masked_positions": zeros(3), "labels": zeros(3)}, r"masked_positions must be \[2, predictions\], got \[3\]"),
        ({"masked_positions": zeros(1, 3), "labels": zeros(1, 3)}, r"masked_positions must be \[2, predictions\], got \[1, 3\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(small_model: Build, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_model()(**{"input_ids": zeros(2, 8), **arguments})
