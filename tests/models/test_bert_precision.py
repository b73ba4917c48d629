"""The model in 16-bit types: fp32 masters with casts, or 16-bit parameters; and nothing that overflows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tempo
from models.bert import BertForPreTraining

Build = Callable[..., BertForPreTraining]
LAYERS = ["torch", "tempo"]
HALVES = [torch.float16, torch.bfloat16]


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


def forward_backward(model: BertForPreTraining, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients; the loss is scaled as fp16 training does, the gradients are scaled back."""
    output = model(**batch, rng=tempo.make_rng(5))
    (output.loss * 1024.0).backward()
    return output.prediction_logits, {name: p.grad / 1024.0 for name, p in model.named_parameters()}


@pytest.mark.parametrize("whole", [False, True], ids=["fp32_parameters", "16bit_parameters"])
@pytest.mark.parametrize("dtype", HALVES)
def test_tempo_layers_are_as_near_to_float32_as_the_baseline(
    small_model: Build, gathered_batch: dict, dtype: torch.dtype, whole: bool
) -> None:
    """The three-way rule: at most twice PyTorch's own error in the same type."""

    def run(layers: str, low: bool) -> tuple[Tensor, dict[str, Tensor]]:
        model = small_model(layers=layers, dropout_generator="philox", compute_dtype=dtype if low and not whole else None)
        return forward_backward(model.to(dtype) if low and whole else model, gathered_batch)

    exact_logits, exact_gradients = run("torch", low=False)
    baseline_logits, baseline_gradients = run("torch", low=True)
    logits, found = run("tempo", low=True)
    assert logits.dtype == dtype
    assert error(baseline_logits, exact_logits) < 0.05
    assert error(logits, exact_logits) <= 2 * error(baseline_logits, exact_logits) + 1e-3
    for name, exact in exact_gradients.items():
        if name.endswith("key.bias"):  # exactly 0 in exact arithmetic: softmax does not see a constant
            continue
        assert found[name].dtype == (dtype if whole else torch.float32), name
        assert error(found[name], exact) <= 2 * error(baseline_gradients[name], exact) + 0.01, name


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("dtype", HALVES)
def test_losses_are_float32_and_masters_stay_float32(
    small_model: Build, gathered_batch: dict, dtype: torch.dtype, layers: str
) -> None:
    model = small_model(layers=layers, compute_dtype=dtype)
    output = model(**gathered_batch)
    for loss in (output.loss, output.mlm_loss, output.mlm_loss_sum, output.nsp_loss, output.nsp_loss_sum):
        assert loss.dtype == torch.float32
    assert output.prediction_logits.dtype == output.seq_relationship_logits.dtype == dtype
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("whole", [False, True], ids=["fp32_parameters", "16bit_parameters"])
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_fully_padded_sequences_stay_finite(
    small_model: Build, gathered_batch: dict, dtype: torch.dtype, layers: str, whole: bool
) -> None:
    model = small_model(layers=layers, compute_dtype=None if whole else dtype).to(dtype if whole else torch.float32)
    gathered_batch["attention_mask"] = torch.zeros_like(gathered_batch["attention_mask"])
    output = model(**gathered_batch)
    output.loss.backward()
    assert output.loss.isfinite()
    assert output.prediction_logits.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_large_scores_beside_padding_stay_finite_and_padding_stays_unseen(
    small_model: Build, gathered_batch: dict, dtype: torch.dtype, layers: str
) -> None:
    """Scores of some thousands, negative ones among them: added to float16's minimum they would overflow."""
    model = small_model(layers=layers, compute_dtype=dtype, hidden_dropout=0.0, attention_dropout=0.0)
    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            layer.attention.self.query.weight.mul_(40.0)
            layer.attention.self.key.weight.mul_(40.0)
    hidden = model.bert.embeddings(gathered_batch["input_ids"], gathered_batch["token_type_ids"], torch.float32, torch.zeros(2))
    attention = model.bert.encoder.layer[0].attention.self
    scores = attention._heads(attention.query(hidden)) @ attention._heads(attention.key(hidden)).mT * 12**-0.5
    assert scores.min() < -1000
    assert scores.max() > 1000
    model(**gathered_batch).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    mask, ids = gathered_batch["attention_mask"], gathered_batch["input_ids"]
    with torch.no_grad():
        first, second = (model(x, attention_mask=mask).prediction_logits for x in (ids, torch.where(mask, ids, (ids + 1) % 83)))
    assert torch.equal(first[mask], second[mask])


@pytest.mark.parametrize("layers", LAYERS)
def test_padding_of_the_vocabulary_takes_no_part_in_float16(small_model: Build, gathered_batch: dict, layers: str) -> None:
    """float16's minimum must weigh nothing in a float32 softmax, however low the logits are."""
    model = small_model(layers=layers, compute_dtype=torch.float16, hidden_dropout=0.0, attention_dropout=0.0)
    with torch.no_grad():
        model.cls.predictions.bias[:83] -= 1000.0
    output = model(**gathered_batch)
    output.loss.backward()
    labels = gathered_batch["labels"].view(-1)
    expected = torch.nn.functional.cross_entropy(output.prediction_logits.float(), labels)
    assert torch.allclose(output.mlm_loss, expected, rtol=1e-6)
    assert (model.cls.predictions.bias.grad[83:] == 0).all()
    assert (model.bert.embeddings.word_embeddings.weight.grad[83:] == 0).all()


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("dtype", HALVES)
def test_decoding_every_position_with_gradients_works_in_16_bits(
    small_model: Build, batch: dict, dtype: torch.dtype, layers: str
) -> None:
    """Without labels the logits are [B, S, V]; in-place layers must meet no view of a custom function's result."""
    model = small_model(layers=layers, compute_dtype=dtype)
    logits = model(batch["input_ids"]).prediction_logits
    assert logits.shape == (8, 20, 83)
    logits.float().mean().backward()
    assert all(p.grad.isfinite().all() for name, p in model.named_parameters() if p.grad is not None)
