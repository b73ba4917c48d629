from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tempo

WIDTH, INTERMEDIATE, HEADS, P = 1024, 4096, 16, 0.1


class Layer(nn.Module):
    """A layer of BERT-Large put together from the public parts of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (tempo.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = tempo.Linear(WIDTH, INTERMEDIATE), tempo.Linear(INTERMEDIATE, WIDTH)
        self.norm_1, self.norm_2 = tempo.InplaceLayerNorm(WIDTH), tempo.InplaceLayerNorm(WIDTH)
        self.gelu = tempo.InplaceGelu()

    def forward(self, x: Tensor, mask: Tensor, rng: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (f(x).view(batch, length, HEADS, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        context = tempo.attention(q, k, v, mask, p=P, rng=rng, site=1).transpose(1, 2).reshape(x.shape)
        x = self.norm_1(x + tempo.dropout(self.output(context), P, rng, 2))
        hidden = self.gelu(self.up(x.view(-1, WIDTH)))
        return self.norm_2(x + tempo.dropout(self.down(hidden).view(x.shape), P, rng, 3))


@pytest.mark.parametrize(("length", "limit"), [(128, 25_300), (512, 37_600)])
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_a_layer_of_bert_large_keeps_what_the_design_says(length: int, limit: int, parameters: torch.dtype) -> None:
    mask = torch.ones(1, length, dtype=torch.bool)
    x = torch.randn(1, length, WIDTH).bfloat16().requires_grad_()
    layers = [Layer().to(parameters) for _ in range(2)]

    def run(num_layers: int) -> int:
        class Stack(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(layers[:num_layers])

            def forward(self, x: Tensor) -> Tensor:
                for layer in self.layers:
                    x = layer(x, mask, tempo.make_rng(1))
                return x

        return tempo.saved_bytes(Stack(), x).total_bytes

    # What one more layer adds: its input is the layer's before it.
    assert run(2) - run(1) <= limit * length


def test_each_storage_counts_once_and_parameters_do_not() -> None:
    layer = nn.Linear(20, 20)
    x = torch.randn(4, 20, requires_grad=True)
    kept = tempo.saved_bytes(layer.forward, x)  # as a function, its weight counts
    assert kept.total_bytes == (4 * 20 + 20 * 20) * 4
    assert tempo.saved_bytes(layer, x).total_bytes == 4 * 20 * 4

    class Twice(nn.Module):
        def forward(self, t: Tensor) -> Tensor:
            y = torch.sigmoid(t)  # keeps y; the products keep y and a view of it
            return (y * y.view(-1).view(4, 20)).sum()

    kept = tempo.saved_bytes(Twice(), x)
    assert [item.num_bytes for item in kept.items] == [4 * 20 * 4]
    assert kept.items[0].num_uses == 3


def test_items_say_where_and_the_table_adds_up() -> None:
    model = nn.Sequential(nn.Linear(8, 6), tempo.InplaceGelu(), nn.Sequential(tempo.InplaceLayerNorm(6)))
    x = torch.randn(3, 8)
    kept = tempo.saved_bytes(model, x)
    by_module = {(item.module, item.dtype): item for item in kept.items}
    assert by_module["1", torch.uint8].num_bytes == 3
    assert by_module["0", torch.float32].shape == (3, 8)
    assert by_module["2.0", torch.int64].num_bytes == 6 * 8
    assert by_module["1", torch.uint8].source.startswith("tempo/gelu.py:")
    assert sum(item.num_bytes for item in kept.items) == kept.total_bytes
    table = str(kept)
    assert f"{kept.total_bytes:,}" in table.splitlines()[-1]
    assert all(item.module in table for item in kept.items)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_error_in_the_module_comes_through_and_leaves_no_hooks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5))
    with pytest.raises(RuntimeError, match="shapes"):
        tempo.saved_bytes(model, torch.ones(2, 4))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_checkpointing_keeps_its_input_only() -> None:
    layer = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    x = torch.randn(8, 16, requires_grad=True)
    kept = tempo.saved_bytes(lambda t: checkpoint(layer, t, use_reentrant=False), x)
    assert kept.total_bytes == 8 * 16 * 4


def test_a_compiled_function_is_counted() -> None:
    x = torch.randn(64, 32, requires_grad=True)
    weight = torch.randn(32, 32, requires_grad=True)
    kept = tempo.saved_bytes(torch.compile(lambda t: tempo.gelu(t @ weight, inplace=True), fullgraph=True), x)
    assert kept.total_bytes == 2 * 64 * 32 * 4 + 32 * 32 * 4 + 64 * 32 // 8


def test_no_graph_keeps_nothing() -> None:
    assert tempo.saved_bytes(lambda t: t * 2.0, torch.ones(3)).total_bytes == 0
    assert tempo.saved_bytes(nn.Identity(), torch.ones(3)).items == []
