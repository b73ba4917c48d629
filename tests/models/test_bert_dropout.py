"""Dropout of the whole model: the same masks in every mode, whatever the micro-batch, and again when a layer is run again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tempo
from models.bert import BertForPreTraining
from models.layers import Dropout

Build = Callable[..., BertForPreTraining]
# Every way to draw the masks of Philox; layers of PyTorch keep them, the others draw them again.
PHILOX_MODES = [
    {"layers": "torch", "dropout_generator": "philox"},
    {"layers": "tempo"},
    {"layers": "tempo", "gelu_side_bits": 4},
    {"layers": "torch", "dropout_generator": "philox", "inplace_gelu": True},
    {"layers": "torch", "dropout_generator": "philox", "inplace_layer_norm": True},
    {"layers": "torch", "dropout_recomputation": True},
    {"layers": "tempo", "dropout_recomputation": False, "dropout_generator": "philox"},
]
TWO_MODES = [PHILOX_MODES[0], PHILOX_MODES[1]]


def name_of(mode: dict) -> str:
    return "-".join(str(value) for value in mode.values())


@pytest.mark.parametrize("mode", PHILOX_MODES, ids=name_of)
def test_sites_number_the_dropouts_of_the_model(small_model: Build, mode: dict) -> None:
    sites = {name: module.site for name, module in small_model(**mode).named_modules() if isinstance(module, Dropout)}
    assert sites == {
        "bert.embeddings.dropout": 0,
        "bert.encoder.layer.0.attention.self.dropout": 1,
        "bert.encoder.layer.0.attention.output.dropout": 2,
        "bert.encoder.layer.0.output.dropout": 3,
        "bert.encoder.layer.1.attention.self.dropout": 4,
        "bert.encoder.layer.1.attention.output.dropout": 5,
        "bert.encoder.layer.1.output.dropout": 6,
    }


@pytest.mark.parametrize("mode", PHILOX_MODES[1:], ids=name_of)
def test_every_mode_equals_the_baseline_with_the_same_masks(
    small_model: Build, gathered_batch: dict, gradients: Callable, mode: dict
) -> None:
    rng = tempo.make_rng(11, 1000)
    results = []
    for fields in (PHILOX_MODES[0], mode):
        model = small_model(**fields)
        output = model(**gathered_batch, rng=rng)
        output.loss.backward()
        results.append((output, gradients(model)))
    (expected, expected_gradients), (output, found) = results
    assert torch.allclose(output.loss, expected.loss, rtol=1e-5)
    assert torch.allclose(output.prediction_logits, expected.prediction_logits, rtol=1e-5, atol=1e-5)
    assert found.keys() == expected_gradients.keys()
    for name, gradient in found.items():
        assert torch.allclose(gradient, expected_gradients[name], rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("gelu", ["erf", "tanh"])
def test_losses_of_20_training_steps_agree_between_torch_and_tempo_layers(
    small_model: Build, gathered_batch: dict, gelu: str
) -> None:
    curves = []
    for mode in TWO_MODES:
        model = small_model(gelu=gelu, random=False, **mode)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
        losses = []
        for step in range(20):
            output = model(**gathered_batch, rng=tempo.make_rng(3, 8 * step))
            optimizer.zero_grad()
            output.loss.backward()
            optimizer.step()
            losses.append(output.loss.item())
        curves.append(losses)
    assert curves[0][-1] < curves[0][0] - 0.5
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


@pytest.mark.parametrize("mode", TWO_MODES, ids=name_of)
def test_masks_do_not_depend_on_the_micro_batch(
    small_model: Build, gathered_batch: dict, gradients: Callable, mode: dict
) -> None:
    model = small_model(**mode)
    whole = model(**gathered_batch, rng=tempo.make_rng(7, 100))
    (whole.mlm_loss_sum + whole.nsp_loss_sum).backward()
    expected = gradients(model)
    model.zero_grad()
    logits = []
    for start in (0, 4):
        part = model(
            **{key: value[start : start + 4] for key, value in gathered_batch.items()}, rng=tempo.make_rng(7, 100 + start)
        )
        (part.mlm_loss_sum + part.nsp_loss_sum).backward()
        logits.append(part.prediction_logits)
    assert torch.allclose(torch.cat(logits), whole.prediction_logits, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients(model).items():
        assert torch.allclose(gradient, expected[name], rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize("mode", TWO_MODES, ids=name_of)
def test_seed_and_place_in_the_training_change_the_masks(small_model: Build, gathered_batch: dict, mode: dict) -> None:
    model = small_model(**mode)
    losses = [model(**gathered_batch, rng=tempo.make_rng(*rng)).loss.item() for rng in ((1, 0), (1, 0), (2, 0), (1, 8))]
    assert losses[0] == losses[1]
    assert len(set(losses)) == 3


@pytest.mark.parametrize("mode", [*TWO_MODES, {"layers": "torch"}], ids=name_of)
def test_evaluation_drops_nothing_whatever_the_generator(small_model: Build, gathered_batch: dict, mode: dict) -> None:
    undropped = small_model(hidden_dropout=0.0, attention_dropout=0.0, **mode)
    model = small_model(**mode).eval()
    assert torch.equal(model(**gathered_batch, rng=tempo.make_rng(1)).loss, undropped(**gathered_batch).loss)


@pytest.mark.parametrize("mode", TWO_MODES, ids=name_of)
def test_without_rng_the_model_counts_its_own_training_samples(small_model: Build, gathered_batch: dict, mode: dict) -> None:
    model = small_model(**mode)
    seed = torch.initial_seed()
    first, second = model(**gathered_batch).loss, model(**gathered_batch).loss
    model.eval()(**gathered_batch)  # is not counted
    third = model.train()(**gathered_batch).loss
    for count, loss in enumerate((first, second, third)):
        assert torch.equal(loss, model(**gathered_batch, rng=tempo.make_rng(seed, 8 * count)).loss)


def test_the_baseline_draws_from_pytorchs_generator(small_model: Build, gathered_batch: dict) -> None:
    model = small_model(layers="torch")
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(model(**gathered_batch, rng=tempo.make_rng(99)).loss.item())
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("mode", [*TWO_MODES, {"layers": "torch"}], ids=name_of)
def test_activation_checkpointing_changes_no_bit(
    small_model: Build, gathered_batch: dict, gradients: Callable, mode: dict
) -> None:
    results = []
    for checkpointing in (False, True):
        model = small_model(activation_checkpointing=checkpointing, **mode)
        torch.manual_seed(4)
        loss = model(**gathered_batch, rng=tempo.make_rng(5, 16)).loss
        torch.manual_seed(6)  # the backward pass must not depend on where the generator stands
        loss.backward()
        results.append((loss, gradients(model)))
    (expected, expected_gradients), (loss, found) = results
    assert torch.equal(loss, expected)
    for name, gradient in found.items():
        assert torch.equal(gradient, expected_gradients[name]), name


@pytest.mark.parametrize("layers", ["torch", "tempo"])
def test_dropping_everything_leaves_a_finite_model(small_model: Build, gathered_batch: dict[str, Tensor], layers: str) -> None:
    model = small_model(layers=layers, hidden_dropout=1.0, attention_dropout=1.0)
    loss = model(**gathered_batch).loss
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
