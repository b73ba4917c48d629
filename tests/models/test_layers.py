"""What a layer keeps for the backward pass, and which elements the model's dropout keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tempo
from benchmarks.memory import bytes_of_one_more_layer
from models.config import BertConfig
from models.layers import Dropout, Gelu, layer_norm

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


# DESIGN 4: PyTorch on a CPU keeps dropout masks in the type of the activations.
BASELINE = {128: 49_160, 512: 86_024}
TEMPO = {128: 25_300, 512: 37_600}


@pytest.mark.parametrize("length", [128, 512])
def test_the_baseline_keeps_what_pytorch_keeps(length: int) -> None:
    assert bytes_of_one_more_layer(length, 1, layers="torch") == BASELINE[length] * length


@pytest.mark.parametrize("length", [128, 512])
def test_the_baseline_with_fp32_masters_keeps_only_two_cast_layer_norms_more(length: int) -> None:
    extra = bytes_of_one_more_layer(length, 1, layers="torch", masters=FLOAT32) - BASELINE[length] * length
    # 16-bit weight and bias of two LayerNorms, whatever the batch; no activation in float32, no cast weight of a linear layer.
    assert 0 <= extra <= 2 * 2 * 1024 * 2


@pytest.mark.parametrize("masters", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("length", [128, 512])
def test_tempo_layers_keep_what_the_design_allows(length: int, masters: torch.dtype) -> None:
    assert bytes_of_one_more_layer(length, 1, layers="tempo", masters=masters) <= TEMPO[length] * length


def test_the_fourth_side_bit_costs_three_bits_an_element_of_the_mlp() -> None:
    one, four = (bytes_of_one_more_layer(128, 1, layers="tempo", gelu_side_bits=bits) for bits in (1, 4))
    assert four - one == 128 * 4096 * 3 // 8


def test_each_technique_alone_saves_its_share() -> None:
    """Bytes per token; they add up."""
    baseline = BASELINE[128]
    gelu = baseline - bytes_of_one_more_layer(128, 1, inplace_gelu=True) / 128
    norm = baseline - bytes_of_one_more_layer(128, 1, inplace_layer_norm=True) / 128
    dropout = baseline - bytes_of_one_more_layer(128, 1, dropout_recomputation=True) / 128
    assert gelu == pytest.approx(8192 - 512, abs=8)
    assert norm == pytest.approx(2 * 2048 - 2 * 32, abs=8)
    # Two masks of 2048; of the attention the mask and the dropped probabilities, each 16 heads x 128 x 2 bytes.
    assert dropout == pytest.approx(2 * 2048 + 2 * 4096, abs=8)
    together = baseline - bytes_of_one_more_layer(128, 1, layers="tempo") / 128
    assert together == pytest.approx(gelu + norm + dropout, abs=16)


def test_activation_checkpointing_keeps_a_layers_input_only() -> None:
    one, two = (bytes_of_one_more_layer(128, batch, layers="tempo", activation_checkpointing=True) for batch in (1, 2))
    assert two - one == 128 * 2048


CONFIGS = {
    "keeps_the_mask": BertConfig(layers="torch", dropout_generator="philox"),
    "draws_again": BertConfig(layers="tempo"),
}


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 4, 6, 6), (5, 8)])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_philox_dropout_keeps_the_elements_of_the_reference_mask_forward_and_backward(
    config: BertConfig, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    rng = tempo.make_rng(123, 45)
    x = (torch.rand(shape) + 1.0).to(dtype).requires_grad_()
    y = Dropout(config, 0.25, site=9)(x, rng)
    keep = tempo.keep_mask(shape, 0.25, rng, 9)
    expected = torch.where(keep, x * (1 / 0.75), torch.zeros((), dtype=dtype))
    assert torch.equal(y, expected)
    y.sum().backward()
    assert torch.equal(x.grad != 0, keep)
    assert torch.allclose(x.grad[keep], torch.tensor(1 / 0.75, dtype=dtype))


@pytest.mark.parametrize("config", [*CONFIGS.values(), BertConfig()], ids=[*CONFIGS, "pytorch"])
def test_dropout_at_its_ends(config: BertConfig) -> None:
    x, rng = torch.full((4, 8), float("nan")), tempo.make_rng(1)
    assert Dropout(config, 0.0, site=0)(x, rng) is x
    assert Dropout(config, 0.5, site=0).eval()(x, rng) is x
    everything = Dropout(config, 1.0, site=0)(torch.ones(4, 8), rng)
    assert (everything == 0).all()


@pytest.mark.parametrize("gelu", ["erf", "tanh"])
@pytest.mark.parametrize("inplace", [False, True])
def test_gelu_is_the_one_that_was_asked_for(gelu: str, inplace: bool) -> None:
    x = torch.linspace(-6, 6, 1001, dtype=torch.float32)
    exact = torch.nn.functional.gelu(x.double(), approximate="tanh" if gelu == "tanh" else "none").float()
    module = Gelu(BertConfig(gelu=gelu, inplace_gelu=inplace))
    source: Tensor = x.clone().requires_grad_() * 1.0
    result = module(source)
    assert torch.allclose(result, exact, atol=1e-6)
    assert (result.data_ptr() == source.data_ptr()) is inplace


def test_gelu_without_gradients_leaves_its_input_alone() -> None:
    x = torch.linspace(-3, 3, 31)
    with torch.no_grad():
        Gelu(BertConfig(layers="tempo"))(x)
    assert torch.equal(x, torch.linspace(-3, 3, 31))


@pytest.mark.parametrize("layers", ["torch", "tempo"])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, torch.float16])
def test_layer_norm_takes_16_bit_activations_with_fp32_parameters(layers: str, dtype: torch.dtype) -> None:
    module = layer_norm(BertConfig(hidden_size=48, num_heads=4, layers=layers))
    with torch.no_grad():
        module.weight.uniform_(0.5, 1.5)
        module.bias.normal_(0, 0.1)
    x = torch.randn(9, 48, dtype=dtype, requires_grad=True)
    y = module(x)
    assert y.dtype == dtype
    exact = torch.nn.functional.layer_norm(x.double(), (48,), module.weight.double(), module.bias.double(), module.eps)
    eps = torch.finfo(dtype).eps
    assert torch.allclose(y.double(), exact, atol=4 * eps * exact.abs().max().item())
    y.sum().backward()
    assert module.weight.grad.dtype == module.bias.grad.dtype == FLOAT32
    assert x.grad.dtype == dtype
