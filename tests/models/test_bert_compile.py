"""torch.compile of the whole model as one graph gives what eager mode gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tempo
from models.bert import BertForPreTraining

CASES = {
    "torch": ({"layers": "torch", "dropout_generator": "philox"}, None),
    "tempo": ({"layers": "tempo"}, None),
    "tempo_bfloat16": ({"layers": "tempo"}, torch.bfloat16),
    "tempo_checkpointing": ({"layers": "tempo", "gelu_side_bits": 4, "activation_checkpointing": True}, None),
}


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "compute_dtype"), CASES.values(), ids=CASES)
def test_the_whole_model_compiles_as_one_graph_and_equals_eager(
    small_model: Callable[..., BertForPreTraining],
    gathered_batch: dict,
    gradients: Callable,
    mode: dict,
    compute_dtype: torch.dtype | None,
) -> None:
    torch.compiler.reset()
    model = small_model(num_layers=1, compute_dtype=compute_dtype, **mode)
    results = []
    for run in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad()
        output = run(**gathered_batch, rng=tempo.make_rng(5, 16))
        output.loss.backward()
        results.append((output, gradients(model)))
    (expected, expected_gradients), (output, found) = results
    # Compiled code keeps more digits between fused bfloat16 operations.
    tolerance = 1e-5 if compute_dtype is None else 0.03
    assert torch.allclose(output.loss, expected.loss, rtol=tolerance)
    assert torch.equal(output.num_masked, expected.num_masked)
    scale = expected.prediction_logits.float().abs().max().item()
    assert torch.allclose(output.prediction_logits, expected.prediction_logits, atol=tolerance * scale, rtol=0)
    for name, gradient in found.items():
        scale = max(expected_gradients[name].abs().max().item(), 0.01)
        assert torch.allclose(gradient, expected_gradients[name], atol=3 * tolerance * scale, rtol=0), name
