from __future__ import annotations

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint

import tempo

RNG = tempo.make_rng(3, 5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_forward_and_backward_use_the_same_mask(dtype: torch.dtype) -> None:
    x = torch.randn(4, 7, 33, dtype=dtype, requires_grad=True)
    y = tempo.dropout(x, 0.25, RNG, site=2)
    grad = torch.randn_like(y)
    y.backward(grad)
    keep = tempo.keep_mask(x.shape, 0.25, RNG, 2)
    assert torch.equal(y != 0, keep & (x != 0))
    assert torch.equal(x.grad != 0, keep & (grad != 0))
    torch.testing.assert_close(y.detach()[keep], x.detach()[keep] / 0.75)
    torch.testing.assert_close(x.grad[keep], grad[keep] / 0.75)


def test_nothing_but_the_generator_is_kept() -> None:
    x = torch.randn(16, 128, 64, requires_grad=True)
    kept = tempo.saved_bytes(lambda t: tempo.dropout(t, 0.1, RNG, 0), x)
    assert kept.total_bytes == 16


def test_eval_and_p_zero_are_the_identity_and_p_one_is_zero() -> None:
    x = torch.randn(3, 4)
    assert tempo.dropout(x, 0.5, RNG, 0, training=False) is x
    assert tempo.dropout(x, 0.0, RNG, 0) is x
    assert (tempo.dropout(x, 1.0, RNG, 0) == 0).all()


def test_a_dropped_nan_is_zero_both_ways() -> None:
    x = torch.full((4, 8), float("nan"), requires_grad=True)
    y = tempo.dropout(x, 0.5, RNG, 0)
    keep = tempo.keep_mask(x.shape, 0.5, RNG, 0)
    assert (y[~keep] == 0).all()
    y.backward(torch.full_like(y, float("inf")))
    assert (x.grad[~keep] == 0).all()


def test_gradcheck() -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: tempo.dropout(t, 0.4, RNG, 1), (x,))


def test_mask_is_the_same_under_checkpointing_and_compile() -> None:
    x = torch.randn(4, 32, requires_grad=True)
    plain = tempo.dropout(x, 0.3, RNG, 4)
    assert torch.equal(plain, checkpoint(lambda t: tempo.dropout(t, 0.3, RNG, 4), x, use_reentrant=False))
    compiled = torch.compile(lambda t: tempo.dropout(t, 0.3, RNG, 4), fullgraph=True)
    y = compiled(x)
    assert torch.equal(plain, y)
    y.sum().backward()
    assert torch.equal(x.grad != 0, plain != 0)


def test_non_contiguous_input_and_gradient() -> None:
    x = torch.randn(6, 10, 4).transpose(1, 2).requires_grad_()
    y = tempo.dropout(x, 0.5, RNG, 0)
    keep = tempo.keep_mask(x.shape, 0.5, RNG, 0)
    assert torch.equal(y != 0, keep)
    (grad,) = torch.autograd.grad(y, x, torch.ones(6, 10, 4).transpose(1, 2))
    assert torch.equal(grad, keep * 2.0)


def test_mask_is_the_same_under_ddp() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(32))

        def forward(self, x: Tensor) -> Tensor:
            return tempo.dropout(x * self.scale, 0.4, RNG, 6)

    x = torch.rand(4, 32) + 1.0
    keep = tempo.keep_mask(x.shape, 0.4, RNG, 6)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(Model())
        y = model(x)
        y.sum().backward()
    finally:
        distributed.destroy_process_group()
    assert torch.equal(y != 0, keep)
    torch.testing.assert_close(model.module.scale.grad, (x * keep / 0.6).sum(0))


def test_a_counter_inside_checkpointing_is_an_error_and_not_a_wrong_gradient() -> None:
    counter = tempo.SampleCounter()

    def f(x: Tensor) -> Tensor:
        return tempo.dropout(x, 0.5, counter.next(x.shape[0], x.device), 0).square()

    y = checkpoint(f, torch.randn(4, 8, requires_grad=True), use_reentrant=False)
    with pytest.raises(RuntimeError, match="make_rng"):
        y.sum().backward()


def test_a_counter_counts_samples() -> None:
    torch.manual_seed(77)
    counter = tempo.SampleCounter()
    assert counter.next(5, torch.device("cpu")).tolist() == [77, 0]
    assert counter.next(2, torch.device("cpu")).tolist() == [77, 5]
    assert counter.next(1, torch.device("cpu")).tolist() == [77, 7]


@pytest.mark.parametrize("x", [torch.tensor(1.0), torch.ones(3, 4, dtype=torch.int64)])
def test_scalars_and_integers_are_refused(x: Tensor) -> None:
    with pytest.raises(ValueError, match="dropout needs"):
        tempo.dropout(x, 0.5, RNG, 0)


@pytest.mark.parametrize("p", [-0.1, 1.1])
def test_a_wrong_probability_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        tempo.dropout(torch.ones(2, 2), p, RNG, 0)


def test_a_wrong_generator_is_refused() -> None:
    with pytest.raises(ValueError, match="make_rng"):
        tempo.dropout(torch.ones(2, 2), 0.1, torch.zeros(2), 0)


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.tempo.dropout.default, (torch.randn(3, 8), 0.3, RNG, 1))
