from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tempo
from tests.csrc.conftest import DTYPES

ops = torch.ops.tempo
SHAPES: list[tuple[int, ...]] = [(1,), (7,), (33,), (1023,), (0,), (4097,), (), (12, 50), (70_001,)]
LR = 0.01


class Arguments(NamedTuple):
    """Of torch.ops.tempo.lamb_step_, in its order."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    copies: list[Tensor]
    step: Tensor
    grad_norm: Tensor
    found_inf: Tensor | None = None
    lr: float = LR
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    use_trust_ratio: bool = True
    bias_correction: bool = True

    def written(self) -> list[Tensor]:
        return [*self.params, *self.exp_avgs, *self.exp_avg_sqs, *self.copies, self.step]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Arguments:
        lists = ([function(t) for t in tensors] for tensors in self[:5])
        return Arguments(*lists, *(function(t) if isinstance(t, Tensor) else t for t in self[5:]))  # type: ignore[arg-type]

    def cloned(self) -> Arguments:
        return self.mapped(lambda t: t.clone(memory_format=torch.preserve_format))

    def in_float64(self) -> Arguments:
        return self.mapped(lambda t: t.double() if t.is_floating_point() else t.clone())


def make(
    generator: torch.Generator,
    shapes: list[tuple[int, ...]] = SHAPES,
    copy_dtype: torch.dtype | None = None,
    step: int = 3,
    grad_norm: float = 5.0,
    **settings: Any,
) -> Arguments:
    """A group after some steps."""

    def randn() -> list[Tensor]:
        return [torch.randn(shape, generator=generator) for shape in shapes]

    params = randn()
    return Arguments(
        params,
        randn(),
        [0.1 * m for m in randn()],
        [v * v for v in randn()],
        [] if copy_dtype is None else [p.to(copy_dtype) for p in params],
        torch.tensor(step),
        torch.tensor(grad_norm),
        **settings,
    )


def bits(tensors: list[Tensor]) -> list[Tensor]:
    return [t.contiguous().view(torch.uint8) if t.dim() else t.reshape(1).view(torch.uint8) for t in tensors]


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


def assert_near_float64(mine: Arguments, exact: Arguments) -> None:
    for a, b in zip(mine.written(), exact.written(), strict=True):
        # Not nearer to 0 than the terms of the sums that cancel there.
        torch.testing.assert_close(a.double(), b.double(), rtol=4e-6, atol=1e-6)


VARIANTS: dict[str, dict[str, Any]] = {
    "clipped": {},
    "not clipped": {"grad_norm": 0.5},
    "no clipping": {"max_grad_norm": 0.0},
    "no ratio": {"use_trust_ratio": False, "weight_decay": 0.0},
    "ratio without decay": {"weight_decay": 0.0},
    "decay without ratio": {"use_trust_ratio": False},
    "no bias correction": {"bias_correction": False},
    "other betas": {"beta1": 0.8, "beta2": 0.95, "eps": 1e-3},
    "first step": {"step": 0},
    "late step": {"step": 123_456_789},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_three_steps_are_those_of_the_reference_in_float64(variant: str, generator: torch.Generator) -> None:
    mine = make(generator, **VARIANTS[variant])
    exact = mine.in_float64()
    for _ in range(3):
        ops.lamb_step_(*mine)
        ops.reference_lamb_step_(*exact)
    assert_near_float64(mine, exact)


@pytest.mark.parametrize("use_trust_ratio", [True, False])
def test_more_tensors_than_a_launch_takes_and_one_larger_than_the_caches(
    use_trust_ratio: bool, generator: torch.Generator
) -> None:
    shapes: list[tuple[int, ...]] = [(i % 97 + 1,) for i in range(230)]
    shapes[100] = (700_001,)
    mine = make(generator, shapes, use_trust_ratio=use_trust_ratio)
    exact = mine.in_float64()
    ops.lamb_step_(*mine)
    ops.reference_lamb_step_(*exact)
    assert_near_float64(mine, exact)


def test_zero_norms_have_the_ratio_1(size: int, generator: torch.Generator) -> None:
    """Zero weights, or no update at all: the step is lr * u."""
    for weight, grad in ((0.0, 1.0), (1.0, 0.0), (0.0, 0.0)):
        a = make(generator, [(size,)], step=0, weight_decay=0.0)
        zeros = [torch.zeros(size)]
        a = a._replace(params=[torch.full((size,), weight)], grads=[torch.full((size,), grad)], exp_avgs=zeros)
        a = a._replace(exp_avg_sqs=[torch.zeros(size)], max_grad_norm=0.0)
        ops.lamb_step_(*a)
        # u is 1 / (1 + eps) for a first gradient of any size.
        torch.testing.assert_close(a.params[0], torch.full((size,), weight - LR * grad))


def test_sums_of_squares_have_double_range_on_a_cpu_and_float_accuracy_anywhere(generator: torch.Generator) -> None:
    """A million elements: one by one in float the sum of squares would lose 4 digits."""
    a = make(generator, [(1_000_003,)], step=0)._replace(params=[torch.full((1_000_003,), 1.1)])
    exact = a.in_float64()
    ops.lamb_step_(*a)
    ops.reference_lamb_step_(*exact)
    change = (a.params[0].double() - 1.1).norm() / (exact.params[0] - 1.1).norm()
    assert abs(change.item() - 1.0) < 1e-5


@pytest.mark.parametrize("how", ["infinite norm", "NaN norm", "found"])
@pytest.mark.parametrize("use_trust_ratio", [True, False])
def test_an_overflow_changes_no_bit(how: str, use_trust_ratio: bool, generator: torch.Generator) -> None:
    norm = {"infinite norm": float("inf"), "NaN norm": float("nan"), "found": 1.0}[how]
    a = make(generator, copy_dtype=torch.bfloat16, grad_norm=norm, use_trust_ratio=use_trust_ratio)
    a = a._replace(found_inf=torch.tensor([1.0 if how == "found" else 0.0]))
    a.grads[3][5] = float("inf")
    a.params[3][:3] = torch.tensor([-0.0, float("nan"), 1e-40])
    a.exp_avgs[3][:3] = torch.tensor([-0.0, float("inf"), 1e-40])
    for op in (ops.lamb_step_, ops.reference_lamb_step_):
        before = a.cloned()
        op(*a)
        assert same_bits(a.written(), before.written())
        assert a.step == 3


def test_no_overflow_found_is_a_step(generator: torch.Generator) -> None:
    a = make(generator)
    b = a.cloned()._replace(found_inf=torch.zeros(()))
    ops.lamb_step_(*a)
    ops.lamb_step_(*b)
    assert same_bits(a.written(), b.written())
    assert a.step == 4


def test_infinite_gradients_under_a_finite_norm_spread_no_further_than_their_tensor(generator: torch.Generator) -> None:
    """A norm that does not fit the gradients is the caller's mistake; the other tensors are right all the same."""
    a, b = (make(torch.Generator().manual_seed(1)) for _ in range(2))
    a.grads[5][17] = float("nan")
    ops.lamb_step_(*a)
    ops.lamb_step_(*b)
    others = [i for i in range(len(SHAPES)) if i != 5]
    assert same_bits([a.params[i] for i in others], [b.params[i] for i in others])
    assert a.params[5].isnan().any()


@pytest.mark.parametrize("copy_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("use_trust_ratio", [True, False])
def test_copies_are_the_new_weights_rounded(copy_dtype: torch.dtype, use_trust_ratio: bool, generator: torch.Generator) -> None:
    a = make(generator, copy_dtype=copy_dtype, use_trust_ratio=use_trust_ratio)
    without = a.cloned()._replace(copies=[])
    before = [copy.clone() for copy in a.copies]
    ops.lamb_step_(*a)
    assert all(torch.equal(copy, p.to(copy_dtype)) for copy, p in zip(a.copies, a.params, strict=True))
    assert not torch.equal(a.copies[-1], before[-1])
    if copy_dtype in DTYPES:
        ops.lamb_step_(*without)
        assert same_bits(a.params, without.params)


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients(grad_dtype: torch.dtype, generator: torch.Generator) -> None:
    a = make(generator)
    a = a._replace(grads=[g.to(grad_dtype) for g in a.grads])
    exact = a.in_float64()
    ops.lamb_step_(*a)
    ops.reference_lamb_step_(*exact)
    assert_near_float64(a, exact)


def test_gradients_that_are_not_contiguous(generator: torch.Generator) -> None:
    a = make(generator, [(33, 40), (5,), (6, 7)])
    b = a.cloned()
    strided = [a.grads[0].t().contiguous().t(), torch.stack([a.grads[1]] * 2, 1)[:, 0], a.grads[2]]
    assert not strided[0].is_contiguous()
    assert not strided[1].is_contiguous()
    ops.lamb_step_(*a._replace(grads=strided))
    ops.lamb_step_(*b)
    assert same_bits(a.written(), b.written())


def test_parameters_and_moments_that_are_not_contiguous(generator: torch.Generator) -> None:
    contiguous = make(generator, [(33, 40), (6, 7)], copy_dtype=torch.bfloat16)
    transposed = contiguous.mapped(lambda t: t.t().contiguous().t() if t.dim() == 2 else t.clone())
    assert not transposed.params[0].is_contiguous()
    exact = contiguous.in_float64()
    ops.lamb_step_(*transposed)
    ops.reference_lamb_step_(*exact)
    assert_near_float64(transposed._replace(copies=[]), exact._replace(copies=[]))
    assert all(torch.equal(copy, p.bfloat16()) for copy, p in zip(transposed.copies, transposed.params, strict=True))


def test_memory_that_starts_anywhere(generator: torch.Generator) -> None:
    """Views whose first element is not at a multiple of 16 bytes; what lies around them stays."""
    a = make(generator, [(4097,), (70_001,), (8,)], copy_dtype=torch.bfloat16)
    around: list[Tensor] = []

    def shifted(t: Tensor) -> Tensor:
        if t.dim() == 0:
            return t.clone()
        padded = torch.full((t.numel() + 2,), 7.0, dtype=t.dtype)
        around.append(padded)
        return padded[1:-1].copy_(t)

    b = a.mapped(shifted)
    ops.lamb_step_(*a)
    ops.lamb_step_(*b)
    for x, y in zip(a.written(), b.written(), strict=True):
        torch.testing.assert_close(x, y)
    assert all(padded[0] == 7 and padded[-1] == 7 for padded in around)


def test_other_dtypes_reach_the_reference(generator: torch.Generator) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        a = make(generator)
        a = a._replace(params=[p.to(dtype) for p in a.params])
        b = a.cloned()
        ops.lamb_step_(*a)
        ops.reference_lamb_step_(*b)
        assert same_bits(a.written(), b.written())


def test_a_group_without_tensors_counts_the_step() -> None:
    for op in (ops.lamb_step_, ops.reference_lamb_step_):
        for norm, count in ((1.0, 4), (float("inf"), 3)):
            a = make(torch.Generator(), [], grad_norm=norm)
            op(*a)
            assert a.step == count


def test_does_not_depend_on_the_number_of_threads(threads: Callable[[int], None]) -> None:
    shapes: list[tuple[int, ...]] = [(70_001,), (33,), (4097,), (600_000,), (1023,)]
    for use_trust_ratio in (True, False):
        results = []
        for count in (1, 2, 3):
            threads(count)
            a = make(torch.Generator().manual_seed(5), shapes, use_trust_ratio=use_trust_ratio)
            for _ in range(2):
                ops.lamb_step_(*a)
            results.append(a.written())
        assert same_bits(results[0], results[1])
        assert same_bits(results[0], results[2])


def test_a_tensor_s_step_does_not_depend_on_its_neighbours(generator: torch.Generator) -> None:
    together = make(generator)
    alone = [together.cloned() for _ in SHAPES]
    ops.lamb_step_(*together)
    for i, a in enumerate(alone):
        ops.lamb_step_(*(Arguments(*([t[i]] for t in a[:4]), [], *a[5:])))  # type: ignore[arg-type, misc]
        assert same_bits([a.params[i]], [together.params[i]])


def test_writing_is_counted(generator: torch.Generator) -> None:
    a = make(generator, copy_dtype=torch.bfloat16)
    before = [t._version for t in a.written()]
    ops.lamb_step_(*a)
    assert all(t._version > version for t, version in zip(a.written(), before, strict=True))
    assert all(g._version == 0 for g in a.grads)


def test_opcheck(generator: torch.Generator) -> None:
    shapes: list[tuple[int, ...]] = [(3, 4), (5,), ()]
    torch.library.opcheck(ops.lamb_step_.default, tuple(make(generator, shapes)))
    a = make(generator, shapes, copy_dtype=torch.bfloat16, use_trust_ratio=False)._replace(found_inf=torch.zeros(()))
    torch.library.opcheck(ops.lamb_step_.default, tuple(a))


def test_a_kernel_is_there() -> None:
    assert tempo.kernels.implementation("lamb_step_", "cpu") == "compiled"
