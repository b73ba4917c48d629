"""BERT on the GPU: what a layer keeps, a training step as a CUDA graph, no waiting, and the losses of both kinds of layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tempo
from models.bert import BertForPreTraining, BertLayer
from models.config import BertConfig

pytestmark = pytest.mark.gpu

# DESIGN 4: bytes per token that one more layer of BERT-Large keeps, by sequence length.
BASELINE = {128: 45_072, 512: 75_792}
TEMPO = {128: 25_300, 512: 37_600}
SMALL = {"vocab_size": 1000, "hidden_size": 128, "num_heads": 4, "intermediate_size": 512, "num_layers": 2}
BATCH, LENGTH, PREDICTIONS = 8, 64, 10


def batch(device: torch.device) -> dict[str, Tensor]:
    """Sequences of several lengths with masked positions: all shapes fixed."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.tensor([64, 64, 40, 33, 20, 12, 64, 50])
    made = {
        "input_ids": torch.randint(1, 1000, (BATCH, LENGTH), generator=generator),
        "token_type_ids": torch.randint(0, 2, (BATCH, LENGTH), generator=generator),
        "attention_mask": torch.arange(LENGTH) < lengths[:, None],
        # All different: PyTorch adds up the gradients of one place in any order.
        "masked_positions": torch.arange(PREDICTIONS).repeat(BATCH, 1),
        "labels": torch.randint(0, 1000, (BATCH, PREDICTIONS), generator=generator),
        "next_sentence_label": torch.randint(0, 2, (BATCH,), generator=generator),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def small_model(device: torch.device, compute_dtype: torch.dtype | None = None, **fields: object) -> BertForPreTraining:
    torch.manual_seed(0)
    return BertForPreTraining(BertConfig(**{**SMALL, **fields}), compute_dtype).to(device)


def bytes_of_one_more_layer(length: int, device: torch.device, **fields: object) -> int:
    """What BERT-Large with two layers keeps, less what it keeps with one; the vocabulary is small, which changes neither."""
    totals = []
    for num_layers in (1, 2):
        config = BertConfig.preset("bert_large", num_layers=num_layers, vocab_size=64, **fields)
        model = BertForPreTraining(config, torch.bfloat16).to(torch.bfloat16).to(device)
        positions = torch.zeros(1, 1, dtype=torch.int64, device=device)
        kept = tempo.saved_bytes(
            model,
            torch.zeros(1, length, dtype=torch.int64, device=device),
            attention_mask=torch.ones(1, length, dtype=torch.bool, device=device),
            labels=positions,
            masked_positions=positions,
            rng=tempo.make_rng(1, device=device),
        )
        totals.append(kept.total_bytes)
    return totals[1] - totals[0]


@pytest.mark.parametrize("length", [128, 512])
def test_the_baseline_keeps_what_the_paper_says(length: int, cuda: torch.device) -> None:
    assert bytes_of_one_more_layer(length, cuda, layers="torch") == BASELINE[length] * length


@pytest.mark.parametrize("length", [128, 512])
def test_tempo_layers_keep_what_the_design_allows(length: int, device: torch.device) -> None:
    assert bytes_of_one_more_layer(length, device, layers="tempo") <= TEMPO[length] * length


def loss_and_gradients(model: BertForPreTraining, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    output = model(**batch(device), rng=tempo.make_rng(4, 100, device))
    output.loss.backward()
    # The gradient of key.bias is exactly 0 in exact arithmetic: softmax does not see a constant.
    named = {name: p.grad for name, p in model.named_parameters() if not name.endswith("key.bias")}
    return output.loss.detach(), named


@pytest.mark.parametrize("compute_dtype", [None, torch.float16, torch.bfloat16])
def test_tempo_layers_are_as_near_to_float32_as_the_baseline_with_the_same_masks(
    compute_dtype: torch.dtype | None, device: torch.device
) -> None:
    fields = {"dropout_generator": "philox"}
    exact_loss, exact = loss_and_gradients(small_model(device, layers="torch", **fields), device)
    _, baseline = loss_and_gradients(small_model(device, compute_dtype, layers="torch", **fields), device)
    loss, gradients = loss_and_gradients(small_model(device, compute_dtype, layers="tempo", **fields), device)
    torch.testing.assert_close(loss, exact_loss, rtol=1e-5 if compute_dtype is None else 1e-2, atol=0.0)
    for name, gradient in gradients.items():
        scale = exact[name].norm()
        error, allowed = ((g[name] - exact[name]).norm() / scale for g in (gradients, baseline))
        slack = 1e-4 if compute_dtype is None else 0.02
        assert error <= 2 * allowed + slack, f"{name}: {error:.3g}, the baseline's {allowed:.3g}"
        assert gradient.dtype == torch.float32


def test_a_whole_training_step_never_waits_for_the_device(cuda: torch.device) -> None:
    model, inputs = small_model(cuda, torch.bfloat16, layers="tempo"), batch(cuda)
    rng = tempo.make_rng(1, device=cuda)
    model(**inputs, rng=rng).loss.backward()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(**inputs, rng=rng).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.slow
def test_the_compiled_model_equals_eager(cuda: torch.device) -> None:
    torch.compiler.reset()
    model, inputs = small_model(cuda, layers="tempo", num_layers=1), batch(cuda)
    results = []
    for run in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad()
        output = run(**inputs, rng=tempo.make_rng(5, 16, cuda))
        output.loss.backward()
        results.append((output.loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    (expected, expected_gradients), (loss, gradients) = results
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0.0)
    for name, gradient in gradients.items():
        scale = max(expected_gradients[name].abs().max().item(), 0.01)
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=0.0, atol=1e-3 * scale)


def sgd_step(layer: BertLayer, x: Tensor, mask: Tensor, rng: Tensor, target: Tensor) -> Tensor:
    """One step in place; returns the loss."""
    parameters = list(layer.parameters())
    loss = (layer(x, mask, rng) - target).float().square().mean()
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        torch._foreach_add_(parameters, gradients, alpha=-0.1)
    return loss.detach()


def make_layer(device: torch.device) -> BertLayer:
    torch.manual_seed(0)
    return BertLayer(BertConfig(**SMALL, layers="tempo"), site=1).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_step_of_a_layer_as_a_cuda_graph(dtype: torch.dtype, cuda: torch.device) -> None:
    """Captured once, replayed with new inputs and new samples: the masks follow `rng`, the weights move as in eager mode."""
    shape = (BATCH, LENGTH, SMALL["hidden_size"])
    steps = [[torch.randn(shape, device=cuda, dtype=dtype) for _ in range(2)] for _ in range(4)]
    mask = torch.arange(LENGTH, device=cuda) < torch.tensor([64, 64, 40, 33, 20, 12, 1, 50]).to(cuda)[:, None]
    rngs = [tempo.make_rng(3, BATCH * step, cuda) for step in range(4)]

    eager = make_layer(cuda)
    expected = [sgd_step(eager, x, mask, rng, target) for (x, target), rng in zip(steps, rngs, strict=True)]

    layer = make_layer(cuda)
    start = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    x, target, rng = steps[0][0].clone(), steps[0][1].clone(), rngs[0].clone()
    side = torch.cuda.Stream(cuda)
    side.wait_stream(torch.cuda.current_stream(cuda))
    with torch.cuda.stream(side):
        for _ in range(3):
            sgd_step(layer, x, mask, rng, target)
    torch.cuda.current_stream(cuda).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = sgd_step(layer, x, mask, rng, target)
    layer.load_state_dict(start)  # in place: the graph knows these addresses

    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for (new_x, new_target), new_rng, wanted in zip(steps, rngs, expected, strict=True):
        x.copy_(new_x)
        target.copy_(new_target)
        rng.copy_(new_rng)
        graph.replay()
        torch.testing.assert_close(loss, wanted, rtol=tolerance, atol=0.0)
    for name, tensor in layer.state_dict().items():
        torch.testing.assert_close(tensor, eager.state_dict()[name], rtol=tolerance, atol=tolerance)


def test_training_is_deterministic(device: torch.device) -> None:
    """Without atomic additions of ours: two runs of three steps give the same weights bit for bit."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool, device=device)
    shape = (BATCH, LENGTH, SMALL["hidden_size"])
    x, target = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    runs = []
    for _ in range(2):
        layer = make_layer(device)
        losses = [sgd_step(layer, x, mask, tempo.make_rng(3, BATCH * step, device), target) for step in range(3)]
        runs.append([*losses, *layer.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_activation_checkpointing_changes_no_bit(device: torch.device) -> None:
    results = []
    for checkpointing in (False, True):
        model = small_model(device, torch.bfloat16, layers="tempo", activation_checkpointing=checkpointing)
        loss = model(**batch(device), rng=tempo.make_rng(5, 16, device)).loss
        loss.backward()
        # The embeddings' gradient is summed by PyTorch with atomic additions, in any order.
        kept = {name: p.grad for name, p in model.named_parameters() if "embeddings" not in name}
        results.append((loss.detach(), kept))
    (expected, expected_gradients), (loss, gradients) = results
    assert torch.equal(loss, expected)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected_gradients[name]), name
