"""Agreement with HuggingFace's BertForPreTraining, given the same weights; the conversion's strictness."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor

from models.bert import BertForPreTraining
from models.config import BertConfig
from models.convert import from_huggingface, to_huggingface

WORDS, BIAS = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
DECODER = "cls.predictions.decoder.weight"


def huggingface_model(config: BertConfig, hidden_act: str) -> transformers.BertForPreTraining:
    """HuggingFace's model of our shape, no dropout, with biases and LayerNorms that are not neutral."""
    torch.manual_seed(5)
    model = transformers.BertForPreTraining(
        transformers.BertConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.max_position_embeddings,
            hidden_act=hidden_act,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="eager",
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    return (ours - theirs).abs().max().item()


def our_gradients_in_their_names(model: BertForPreTraining, vocab_size: int) -> dict[str, Tensor]:
    result = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name in (WORDS, BIAS):
        assert result[name] is not None
        assert (result[name][vocab_size:] == 0).all(), "the vocabulary's padding learns something"
        result[name] = result[name][:vocab_size]
    return result  # type: ignore[return-value]


GELUS = [("erf", "gelu"), ("tanh", "gelu_new"), ("tanh", "gelu_pytorch_tanh")]


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("vocab_size", [83, 88])
@pytest.mark.parametrize("layers", ["torch", "tempo"])
@pytest.mark.parametrize(("gelu", "hidden_act"), GELUS)
def test_logits_loss_and_all_gradients_equal_huggingfaces(
    small_model: Callable[..., BertForPreTraining],
    batch: dict[str, Tensor],
    gelu: str,
    hidden_act: str,
    layers: str,
    vocab_size: int,
    masked: bool,
) -> None:
    ours = small_model(gelu=gelu, layers=layers, vocab_size=vocab_size, hidden_dropout=0.0, attention_dropout=0.0, random=False)
    theirs = huggingface_model(ours.config, hidden_act)
    ours.load_state_dict(from_huggingface(theirs.state_dict(), ours.config))
    if not masked:
        batch = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    encoder_inputs = {key: batch[key] for key in ("input_ids", "token_type_ids", "attention_mask")}

    ours.eval(), theirs.eval()
    with torch.no_grad():
        our_output, their_output = ours(**encoder_inputs), theirs(**encoder_inputs)
    assert our_output.prediction_logits.shape == (8, 20, vocab_size)
    assert largest_difference(our_output.prediction_logits, their_output.prediction_logits) < 1e-5
    assert largest_difference(our_output.seq_relationship_logits, their_output.seq_relationship_logits) < 1e-5

    ours.train(), theirs.train()
    our_output, their_output = ours(**batch), theirs(**batch)
    assert our_output.loss is not None
    assert largest_difference(our_output.loss, their_output.loss) < 1e-5
    our_output.loss.backward()
    their_output.loss.backward()
    our_gradients = our_gradients_in_their_names(ours, vocab_size)
    their_gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert our_gradients.keys() == their_gradients.keys()
    for name, theirs_gradient in their_gradients.items():
        assert largest_difference(our_gradients[name], theirs_gradient) < 1e-5, name


@pytest.mark.parametrize("layers", ["torch", "tempo"])
def test_default_inputs_equal_huggingfaces(small_model: Callable[..., BertForPreTraining], layers: str, batch: dict) -> None:
    ours = small_model(layers=layers, random=False).eval()
    theirs = huggingface_model(ours.config, "gelu").eval()
    ours.load_state_dict(from_huggingface(theirs.state_dict(), ours.config))
    with torch.no_grad():
        our_logits = ours(batch["input_ids"]).prediction_logits
        their_logits = theirs(batch["input_ids"]).prediction_logits
    assert largest_difference(our_logits, their_logits) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["torch", "tempo"])
def test_bert_base_equals_huggingface_with_their_initial_weights(layers: str) -> None:
    """The depth and the widths of a real model, where rounding has room to grow."""
    config = BertConfig.preset("bert_base", layers=layers)
    ours = BertForPreTraining(config).eval()
    torch.manual_seed(0)
    theirs = transformers.BertForPreTraining(transformers.BertConfig(attn_implementation="eager")).eval()
    ours.load_state_dict(from_huggingface(theirs.state_dict(), config))
    input_ids = torch.randint(0, 30522, (2, 64))
    attention_mask = torch.arange(64) < torch.tensor([[64], [40]])
    with torch.no_grad():
        our_output = ours(input_ids, attention_mask=attention_mask)
        their_output = theirs(input_ids, attention_mask=attention_mask)
    assert largest_difference(our_output.prediction_logits, their_output.prediction_logits) < 1e-5
    assert largest_difference(our_output.seq_relationship_logits, their_output.seq_relationship_logits) < 1e-5


def test_round_trip_gives_the_same_weights_and_loads_strictly_on_both_sides(
    small_model: Callable[..., BertForPreTraining],
) -> None:
    ours = small_model()
    theirs = huggingface_model(ours.config, "gelu")
    theirs.load_state_dict(to_huggingface(ours.state_dict(), ours.config))  # strict
    assert theirs.cls.predictions.decoder.weight.data_ptr() == theirs.bert.embeddings.word_embeddings.weight.data_ptr()
    back = from_huggingface(theirs.state_dict(), ours.config)
    assert back.keys() == ours.state_dict().keys()
    for name, value in ours.state_dict().items():
        assert torch.equal(back[name], value), name


def test_names_are_huggingfaces(small_model: Callable[..., BertForPreTraining]) -> None:
    ours = small_model()
    theirs = huggingface_model(ours.config, "gelu")
    assert {name for name, _ in ours.named_parameters()} == {name for name, _ in theirs.named_parameters()}


def test_missing_and_unexpected_weights_are_named(small_model: Callable[..., BertForPreTraining]) -> None:
    config = small_model().config
    theirs = huggingface_model(config, "gelu").state_dict()
    theirs["bert.encoder.layer.0.attention.self.qury.weight"] = theirs.pop("bert.encoder.layer.0.attention.self.query.weight")
    with pytest.raises(ValueError, match=r"missing \['bert\S+query\.weight'\], unexpected \['bert\S+qury\.weight'\]"):
        from_huggingface(theirs, config)


def test_exporting_missing_and_unexpected_weights_is_refused(small_model: Callable[..., BertForPreTraining]) -> None:
    model = small_model()
    weights = model.state_dict()
    weights["extra"] = weights.pop(BIAS)
    with pytest.raises(ValueError, match=r"missing \['cls\.predictions\.bias'\], unexpected \['extra'\]"):
        to_huggingface(weights, model.config)
    short = {**model.state_dict(), WORDS: torch.zeros(7, 48)}
    with pytest.raises(ValueError, match=r"word_embeddings\.weight \[7, 48\] instead of \[88, 48\]"):
        to_huggingface(short, model.config)


def test_weights_of_another_shape_are_named(small_model: Callable[..., BertForPreTraining]) -> None:
    theirs = huggingface_model(small_model().config, "gelu").state_dict()
    with pytest.raises(ValueError, match=r"position_embeddings\.weight \[40, 48\] instead of \[64, 48\]"):
        from_huggingface(theirs, small_model(max_position_embeddings=64).config)
    with pytest.raises(ValueError, match=r"word_embeddings\.weight \[83, 48\] instead of \[90, 48\]"):
        from_huggingface(theirs, small_model(vocab_size=90, random=False).config)


def test_an_untied_decoder_is_refused_instead_of_dropped(small_model: Callable[..., BertForPreTraining]) -> None:
    config = small_model().config
    theirs = huggingface_model(config, "gelu").state_dict()
    theirs[DECODER] = theirs[DECODER] + 1.0
    with pytest.raises(ValueError, match=r"cls\.predictions\.decoder\.weight differs from .* must be tied"):
        from_huggingface(theirs, config)


def test_older_checkpoints_load_without_the_tied_copy_and_with_position_ids(
    small_model: Callable[..., BertForPreTraining],
) -> None:
    model = small_model()
    theirs = huggingface_model(model.config, "gelu").state_dict()
    del theirs[DECODER]
    theirs["bert.embeddings.position_ids"] = torch.arange(40)[None]
    model.load_state_dict(from_huggingface(theirs, model.config))
    assert torch.equal(model.bert.embeddings.word_embeddings.weight[:83], theirs[WORDS])
