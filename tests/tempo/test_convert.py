from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn

import tempo
from tests.tempo.transformers_models import MODELS, NO_DROPOUT, SMALL, batch, bert, gpt2, logits, loss_of, pair, transformers


@pytest.fixture(params=sorted(MODELS))
def kind(request: pytest.FixtureRequest) -> str:
    torch.manual_seed(5)
    return request.param


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


def test_gradients_are_those_of_the_loss_with_dropout(kind: str) -> None:
    _, converted = pair(kind, torch.float64)
    converted.train()

    def loss() -> Tensor:
        torch.manual_seed(11)
        return logits(converted, batch()).square().mean()

    loss().backward()
    parameters = [p for p in converted.parameters() if p.grad is not None]
    directions = [torch.randn_like(p) for p in parameters]
    expected = sum(float((p.grad * d).sum()) for p, d in zip(parameters, directions, strict=True))
    ends, step = [], 1e-6
    with torch.no_grad():
        for sign in (1, -2):
            for p, d in zip(parameters, directions, strict=True):
                p.add_(d, alpha=sign * step)
            ends.append(float(loss()))
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(expected, rel=1e-4)


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


def test_a_model_converted_after_its_base_reports_the_rest() -> None:
    model = bert()
    assert any(change.after == "tempo.attention" for change in tempo.convert(model.bert).changes)
    rest = tempo.convert(model)
    assert {change.name for change in rest.changes} == {
        "cls.predictions.transform.transform_act_fn",
        "cls.predictions.transform.LayerNorm",
    }


def test_a_base_of_another_configuration_is_converted_too() -> None:
    model = bert()
    model.bert = transformers.BertModel(transformers.BertConfig(**SMALL))
    tempo.convert(model)
    assert all(m.config._attn_implementation == "tempo" for m in model.modules() if type(m).__name__ == "BertSelfAttention")


def test_an_optimizer_made_before_trains_the_converted_model(kind: str) -> None:
    model = MODELS[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tempo.convert(model)
    model.train()
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model, batch()).backward()
    optimizer.step()
    moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True) if p.grad is not None]
    assert sum(moved) > 0.8 * len(moved)


HEADS = ["Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]
CLASSES = [f"{family}{head}" for family in ("Bert", "Roberta", "GPT2") for head in HEADS] + ["BertForMaskedLM", "BertLMHeadModel"]


@pytest.mark.parametrize("name", CLASSES)
def test_every_kind_of_head_computes_the_same(name: str) -> None:
    config = {"Bert": transformers.BertConfig, "Roberta": transformers.RobertaConfig, "GPT2": transformers.GPT2Config}
    fields = {"num_labels": 2, "pad_token_id": 0} | SMALL | {"max_position_embeddings": 40}
    model = getattr(transformers, name)(config[next(f for f in config if name.startswith(f))](**fields)).eval()
    expected = model(**batch())[0]
    tempo.convert(model)
    real = batch()["attention_mask"].bool()
    pick = real if expected.shape[:2] == real.shape else slice(None)
    torch.testing.assert_close(model(**batch())[0][pick], expected[pick], rtol=1e-5, atol=1e-6)


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


def test_compiled_equals_eager(kind: str) -> None:
    _, converted = pair(kind)
    converted.eval()
    compiled = torch.compile(converted)
    torch.testing.assert_close(logits(compiled, batch(False)), logits(converted, batch(False)), rtol=1e-4, atol=1e-5)


def test_compiled_training_equals_eager(kind: str) -> None:
    _, eager = pair(kind)
    copied = copy.deepcopy(eager.train())
    for model in (eager, torch.compile(copied, fullgraph=True)):
        torch.manual_seed(4)
        # The compiled model then takes its seeds from the generator that eager's come from.
        with torch._inductor.config.patch(fallback_random=True):
            logits(model, batch()).square().mean().backward()
    for mine, theirs in zip(copied.parameters(), eager.parameters(), strict=True):
        if theirs.grad is not None:  # the compiler gives zeros to what the loss does not need
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-7)


def test_a_gelu_that_is_no_module_is_listed(kind: str) -> None:
    listed = [name for name, why in tempo.convert(MODELS[kind]()).unchanged if "calls GELU as a function" in why]
    assert listed == (["lm_head"] if kind == "roberta" else [])


def test_other_activations_are_left_and_listed() -> None:
    report = tempo.convert(bert(hidden_act="relu"))
    assert not any("gelu" in change.after for change in report.changes)
    assert any("is not GELU" in why for _, why in report.unchanged)


def with_dropout(p: float) -> nn.Module:
    model = bert()
    model.bert.embeddings.dropout.p = p
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2)), "got Sequential of type None"),
        (lambda: transformers.T5Model(transformers.T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2)), "of type 't5'"),
        (lambda: gpt2(reorder_and_upcast_attn=True), "reorder_and_upcast_attn"),
        (lambda: with_dropout(1.5), r"bert.embeddings.dropout: the dropout probability must lie in \[0, 1\], got 1.5"),
        (lambda: bert(output_attentions=True, attn_implementation="eager"), "output_attentions"),
    ],
)
def test_what_it_cannot_do_right_it_refuses(make, message: str) -> None:
    model = make()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        tempo.convert(model)
    assert [type(module) for module in model.modules()] == classes


def test_wrong_side_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="gelu_side_bits must be 1 or 4, got 2"):
        tempo.convert(bert(), gelu_side_bits=2)
