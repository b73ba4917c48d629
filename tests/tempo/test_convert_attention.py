from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tempo
from tests.tempo.transformers_models import MODELS, SMALL, batch, bert, gpt2, logits, loss_of, pair, transformers

DECODER = {"is_decoder": True, "add_cross_attention": True}


def decoder(kind: str) -> nn.Module:
    """A model that attends to an encoder's output too."""
    if kind == "bert":
        return transformers.BertLMHeadModel(transformers.BertConfig(**SMALL | DECODER))
    if kind == "roberta":
        return transformers.RobertaForCausalLM(transformers.RobertaConfig(**SMALL | DECODER | {"max_position_embeddings": 40}))
    return gpt2(add_cross_attention=True)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_cross_attention_sees_all_of_the_encoder_and_none_of_its_padding(kind: str, masked: bool) -> None:
    model = decoder(kind).eval()
    encoded, mask = torch.randn(3, 7, 64), torch.ones(3, 7)
    mask[0, 5:] = 0
    inputs = batch(False) | {"encoder_hidden_states": encoded} | ({"encoder_attention_mask": mask} if masked else {})
    expected = model(**inputs).logits
    tempo.convert(model)
    torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["bool", "additive"])
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_masks_of_four_dimensions_are_taken_as_they_are(kind: str, form: str) -> None:
    original, converted = pair(kind)
    visible = torch.rand(3, 1, 13, 13) < 0.6
    visible |= torch.eye(13, dtype=torch.bool)
    mask = visible if form == "bool" else torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    inputs = batch(False) | {"attention_mask": mask}
    mine, theirs = (next(iter(model.eval()(**inputs).values())) for model in (converted, original))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"use_cache": False}, {"cache_implementation": "static"}])
def test_generation_of_prompts_padded_on_the_left_is_that_of_the_original(settings: dict[str, Any]) -> None:
    torch.manual_seed(5)
    original, converted = pair("gpt2")
    prompt = batch(False)
    prompt["attention_mask"][1, :4] = 0
    settings = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0} | settings
    expected, mine = (model.eval().generate(**prompt, **settings) for model in (original, converted))
    assert torch.equal(mine, expected)


def test_a_chunk_after_a_cache_sees_what_came_before_and_not_what_comes() -> None:
    original, converted = pair("gpt2")
    ids = batch(False)["input_ids"]

    def second_half(model: nn.Module) -> Tensor:
        cache = model.eval()(input_ids=ids[:, :6], use_cache=True).past_key_values
        return model(input_ids=ids[:, 6:], past_key_values=cache).logits

    torch.testing.assert_close(second_half(converted), second_half(original), rtol=1e-5, atol=1e-6)


def test_scaled_attention_of_gpt2_is_computed_right() -> None:
    original, converted = pair("gpt2", scale_attn_by_inverse_layer_idx=True)
    torch.testing.assert_close(
        logits(converted.eval(), batch(False)), logits(original.eval(), batch(False)), rtol=1e-5, atol=1e-6
    )


def test_evaluation_draws_no_random_numbers() -> None:
    _, converted = pair("bert")
    before = torch.random.get_rng_state()
    converted.eval()(**batch())
    assert torch.equal(torch.random.get_rng_state(), before)
    converted.train()(**batch())
    assert not torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("part", ["whole", "base"])
def test_probabilities_are_refused_at_the_call(part: str) -> None:
    model = bert()
    tempo.convert(model)
    called = model if part == "whole" else model.bert
    with pytest.raises(ValueError, match="does not hand out its probabilities"):
        called(**batch(), output_attentions=True)


def test_probabilities_are_there_again_with_transformers_own_attention() -> None:
    model = bert()
    tempo.convert(model)
    model.set_attn_implementation("eager")
    assert len(model(**batch(), output_attentions=True).attentions) == 2
    assert [change.before for change in tempo.convert(model).changes] == ["BertSelfAttention (eager)"] * 2
    with pytest.raises(ValueError, match="does not hand out its probabilities"):
        model(**batch(), output_attentions=True)


def test_a_head_mask_is_refused() -> None:
    model = bert()
    tempo.convert(model)
    with pytest.raises(ValueError, match="head_mask is not supported"):
        model(**batch(), head_mask=torch.ones(2, 4))


@pytest.mark.parametrize("part", ["whole", "base"])
def test_a_pickle_runs_where_nothing_was_converted(part: str, tmp_path: Path) -> None:
    _, converted = pair("gpt2")
    torch.save(converted if part == "whole" else converted.transformer, tmp_path / "model.pt")
    code = (
        f"import torch; model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "print(model.config._attn_implementation, model(input_ids=torch.ones(2, 5, dtype=torch.long))[0].shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tempo torch.Size([2, 5,")


def run_rank(rank: int, folder: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = gpt2()
    tempo.convert(model)
    wrapped = DistributedDataParallel(model.train())
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        loss = loss_of(wrapped, batch())
        losses.append(loss.item())
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    results[rank] = (losses, gradient.tolist())
    dist.destroy_process_group()


def test_ranks_with_the_same_seed_draw_different_masks(tmp_path: Path) -> None:
    with mp.Manager() as manager:
        results = manager.dict()
        mp.start_processes(run_rank, args=(str(tmp_path), results), nprocs=2, start_method="spawn")
        (first, first_gradient), (second, second_gradient) = results[0], results[1]
    # The same weights, the same batch: what differs is dropout.
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert first[0] == first[1] != first[2]
    assert second[0] == second[1] != second[2]
    assert first_gradient == second_gradient
