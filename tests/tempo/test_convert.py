from __future__ import annotations

import copy
import pickle
from pathlib import Path

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


@pytest.fixture(params=sorted(MODELS))
def kind(request: pytest.FixtureRequest) -> str:
    torch.manual_seed(5)
    return request.param


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


def test_logits_are_equal_in_eval_mode(kind: str) -> None:
    original, converted = pair(kind)
    inputs = batch()
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(
        logits(converted.eval(), inputs)[real], logits(original.eval(), inputs)[real], rtol=1e-5, atol=1e-6
    )


def test_gradients_are_equal_without_dropout(kind: str) -> None:
    original, converted = pair(kind, **NO_DROPOUT[kind])
    for model in (original, converted):
        loss_of(model.train(), batch()).backward()
    for (name, mine), (_, theirs) in zip(converted.named_parameters(), original.named_parameters(), strict=True):
        if theirs.grad is None:
            assert mine.grad is None, name
            continue
        scale = float(theirs.grad.abs().max())
        torch.testing.assert_close(
            mine.grad, theirs.grad, rtol=1e-4, atol=1e-5 * scale + 1e-8, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_bfloat16_is_as_good_as_the_original(kind: str) -> None:
    original, converted = pair(kind, torch.bfloat16)
    exact = copy.deepcopy(original).double().eval()
    inputs = batch()
    real = inputs["attention_mask"].bool()
    truth = logits(exact, inputs)[real]
    errors = [(logits(model.eval(), inputs)[real].double() - truth).abs().max() for model in (converted, original)]
    assert errors[0] <= 2 * errors[1] + 1e-3


def test_names_weights_and_parameters_stay(kind: str) -> None:
    model = MODELS[kind]()
    parameters, names = [id(p) for p in model.parameters()], list(model.state_dict())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tempo.convert(model)
    assert [id(p) for p in model.parameters()] == parameters
    assert list(model.state_dict()) == names
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(isinstance(m, tempo.InplaceLayerNorm) for m in model.modules() if isinstance(m, nn.LayerNorm))


def test_the_report_tells_what_changed(kind: str) -> None:
    report = tempo.convert(MODELS[kind]())
    after = {change.after for change in report.changes}
    assert {"tempo.attention", "tempo.InplaceLayerNorm", "tempo.dropout"} < after
    assert f"tempo.gelu ({'tanh' if kind == 'gpt2' else 'none'}, 1 bit)" in after
    attention = [change.name for change in report.changes if change.after == "tempo.attention"]
    assert len(attention) == 2
    assert all(name in str(report) for name in attention)


def test_training_drops_and_repeats_with_the_seed(kind: str) -> None:
    _, converted = pair(kind)
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(loss_of(converted.train(), batch()).item())
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
    with torch.no_grad():
        assert torch.equal(loss_of(converted.eval(), batch()), loss_of(converted.eval(), batch()))


def test_gradient_checkpointing_draws_the_same_masks(kind: str) -> None:
    _, converted = pair(kind)
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            converted.gradient_checkpointing_enable()
        converted.zero_grad()
        torch.manual_seed(7)
        # Two forward passes before either backward pass: the second must not change what the first one draws again.
        first, second = (loss_of(converted.train(), batch(padded)) for padded in (True, False))
        (first + second).backward()
        results.append([p.grad.clone() for p in converted.parameters() if p.grad is not None])
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("technique", ["gelu", "layer_norm", "attention", "dropout"])
def test_each_technique_alone_keeps_less(kind: str, technique: str) -> None:
    config = {"attn_implementation": "eager"}
    plain = MODELS[kind](**config).train()
    alone, together = copy.deepcopy(plain), copy.deepcopy(plain)
    tempo.convert(alone, **{name: name == technique for name in ("gelu", "layer_norm", "attention", "dropout")})
    tempo.convert(together)
    kept = [tempo.saved_bytes(model, **batch()).total_bytes for model in (plain, alone, together)]
    assert kept[2] < kept[1] < kept[0]


def test_converting_twice_changes_nothing(kind: str) -> None:
    model = MODELS[kind]()
    tempo.convert(model)
    hooks = len(model._forward_pre_hooks)
    again = tempo.convert(model)
    assert again.changes == []
    assert "converted already" in str(again)
    assert len(model._forward_pre_hooks) == hooks


def test_a_model_of_the_same_configuration_is_not_touched(kind: str) -> None:
    converted = MODELS[kind]()
    config = converted.config
    before = config._attn_implementation
    tempo.convert(converted)
    other = type(converted)(config)
    assert config._attn_implementation == before
    assert any(change.after == "tempo.attention" for change in tempo.convert(other).changes)


def test_autocast_trains(kind: str) -> None:
    _, converted = pair(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(converted.train(), batch())
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in converted.parameters() if p.grad is not None)


def test_copies_and_pickles_compute_the_same(kind: str) -> None:
    _, converted = pair(kind)
    expected = logits(converted.eval(), batch())
    for other in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        assert torch.equal(logits(other.eval(), batch()), expected)


def test_saved_models_load_unconverted(kind: str, tmp_path: Path) -> None:
    _, converted = pair(kind)
    converted.save_pretrained(tmp_path)
    loaded = type(converted).from_pretrained(tmp_path).eval()
    assert not any(isinstance(m, tempo.InplaceLayerNorm) for m in loaded.modules())
    torch.testing.assert_close(logits(loaded, batch(False)), logits(converted.eval(), batch(False)), rtol=1e-5, atol=1e-6)


def test_a_fully_padded_row_is_finite(kind: str) -> None:
    _, converted = pair(kind)
    inputs = batch()
    inputs["attention_mask"][2] = 0
    loss = logits(converted.train(), inputs).square().mean()
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in converted.parameters() if p.grad is not None)


def test_generation_with_a_cache_is_that_of_the_original() -> None:
    torch.manual_seed(5)
    original, converted = pair("gpt2")
    prompt = batch(False)
    settings = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    expected, mine = (model.eval().generate(**prompt, **settings) for model in (original, converted))
    assert torch.equal(mine, expected)


def test_compiled_equals_eager(kind: str) -> None:
    _, converted = pair(kind)
    converted.eval()
    compiled = torch.compile(converted)
    torch.testing.assert_close(logits(compiled, batch(False)), logits(converted, batch(False)), rtol=1e-4, atol=1e-5)


def test_other_activations_are_left_and_listed() -> None:
    report = tempo.convert(bert(hidden_act="relu"))
    assert not any("gelu" in change.after for change in report.changes)
    assert any("is not GELU" in why for _, why in report.unchanged)


def test_scaled_attention_of_gpt2_is_computed_right() -> None:
    original, converted = pair("gpt2", scale_attn_by_inverse_layer_idx=True)
    torch.testing.assert_close(
        logits(converted.eval(), batch(False)), logits(original.eval(), batch(False)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2)), "got Sequential of type None"),
        (lambda: transformers.T5Model(transformers.T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2)), "of type 't5'"),
        (lambda: gpt2(reorder_and_upcast_attn=True), "reorder_and_upcast_attn"),
        (lambda: bert(output_attentions=True, attn_implementation="eager"), "output_attentions"),
    ],
)
def test_what_it_cannot_do_right_it_refuses(make, message: str) -> None:
    model = make()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        tempo.convert(model)
    assert [type(module) for module in model.modules()] == classes


def test_probabilities_are_refused_at_the_call() -> None:
    model = bert()
    tempo.convert(model)
    with pytest.raises(ValueError, match="does not hand out its probabilities"):
        model(**batch(), output_attentions=True)


def test_wrong_side_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="gelu_side_bits must be 1 or 4, got 2"):
        tempo.convert(bert(), gelu_side_bits=2)
