from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import tempo

SETTINGS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.01, "max_grad_norm": 1.0}


class Group:
    """Parameters with their state, and the same in float64, computed by the formulas in scalars and tensors one by one."""

    def __init__(self, shapes: list[tuple[int, ...]], weight_decay: float, dtype: torch.dtype = torch.float32) -> None:
        self.weight_decay = weight_decay
        self.params = [torch.randn(shape, dtype=dtype) * 0.1 for shape in shapes]
        self.moments = [[torch.zeros_like(p) for p in self.params] for _ in range(2)]
        self.step = torch.tensor(0)
        self.exact = [(p.double(), torch.zeros(p.shape).double(), torch.zeros(p.shape).double()) for p in self.params]

    def gradients(self, scale: float) -> list[Tensor]:
        return [torch.randn_like(p) * scale for p in self.params]

    def apply(self, gradients: list[Tensor], norm: Tensor, **settings: object) -> None:
        given = {**SETTINGS, "weight_decay": self.weight_decay, "use_trust_ratio": self.weight_decay != 0, **settings}
        tempo.lamb_step_(self.params, gradients, *self.moments, self.step, norm, **given)  # type: ignore[arg-type]

    def apply_exactly(self, gradients: list[Tensor], norm: float, t: int) -> None:
        for (w, m, v), g in zip(self.exact, gradients, strict=True):
            g = g.double() / max(1.0, norm)
            m.copy_(0.9 * m + 0.1 * g)
            v.copy_(0.999 * v + 0.001 * g * g)
            u = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + self.weight_decay * w
            w_norm, u_norm = w.norm().item(), u.norm().item()
            ratio = w_norm / u_norm if self.weight_decay != 0 and w_norm > 0 and u_norm > 0 else 1.0
            w.sub_(0.01 * ratio * u)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.float64, 1e-12)])
def test_100_steps_of_two_groups_follow_the_formulas(dtype: torch.dtype, tolerance: float) -> None:
    decayed = Group([(33, 7), (4097,), (1,), (0, 3)], 0.01, dtype)
    undecayed = Group([(5,), (1023,), ()], 0.0, dtype)
    decayed.params[2].zero_()
    decayed.exact[2][0].zero_()
    applied = 0
    for attempt in range(100):
        scale = 10.0 ** (attempt % 4 - 3)  # some are clipped, some not
        gradients = [group.gradients(scale) for group in (decayed, undecayed)]
        norm = torch.sqrt(sum((g.double() ** 2).sum() for gs in gradients for g in gs))  # type: ignore[arg-type]
        overflow = attempt % 7 == 5
        applied += not overflow
        for group, gs in zip((decayed, undecayed), gradients, strict=True):
            group.apply(gs, norm.to(dtype) / (0.0 if overflow else 1.0))
            if not overflow:
                group.apply_exactly(gs, norm.item(), applied)
    for group in (decayed, undecayed):
        assert group.step == applied == 86
        for i, (w, m, v) in enumerate(group.exact):
            for mine, exact in ((group.params[i], w), (group.moments[0][i], m), (group.moments[1][i], v)):
                torch.testing.assert_close(mine.double(), exact, rtol=tolerance, atol=tolerance * 0.1)


@pytest.mark.parametrize("found", [None, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_overflow_changes_nothing(found: float | None, dtype: torch.dtype) -> None:
    group = Group([(5,), (2, 3)], 0.01, dtype)
    group.apply(group.gradients(1.0), torch.tensor(1.0))
    copies = [p.half() for p in group.params]
    state = [*group.params, *group.moments[0], *group.moments[1], *copies, group.step]
    before = [t.clone() for t in state]
    infinite = [torch.full_like(p, math.inf) for p in group.params]
    norm = torch.tensor(math.inf if found is None else 1.0)
    group.apply(infinite, norm, copies=copies, found_inf=None if found is None else torch.tensor([found]))
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))


@pytest.mark.parametrize("copy_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_copies_get_the_new_weights(copy_dtype: torch.dtype, weight_decay: float) -> None:
    group = Group([(4097,), (3, 5)], weight_decay)
    copies = [torch.zeros_like(p, dtype=copy_dtype) for p in group.params]
    group.apply(group.gradients(1.0), torch.tensor(1.0), copies=copies)
    assert all(torch.equal(copy, p.to(copy_dtype)) for copy, p in zip(copies, group.params, strict=True))


def test_gradients_are_read_only() -> None:
    group = Group([(5,)], 0.01)
    gradients = [torch.full((5,), 100.0)]
    group.apply(gradients, torch.tensor(223.6))
    assert (gradients[0] == 100.0).all()


def test_parameters_that_require_gradients_are_written_under_no_grad_and_their_users_notice() -> None:
    weight = nn.Parameter(torch.ones(4))
    moments = [torch.zeros(4)], [torch.zeros(4)]
    loss = (weight * weight).sum()
    with torch.no_grad():
        tempo.lamb_step_([weight], [torch.ones(4)], *moments, torch.tensor(0), torch.tensor(2.0), lr=0.1)
    assert weight.requires_grad
    assert (weight < 1).all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_compiled_equals_eager() -> None:
    def steps(group: Group) -> None:
        for i in range(3):
            group.apply([torch.full_like(p, 0.1 * (i + 1)) for p in group.params], torch.tensor(1.5))

    eager, compiled = Group([(33,), (4, 5)], 0.01), Group([(33,), (4, 5)], 0.01)
    for a, b in zip(compiled.params, eager.params, strict=True):
        a.copy_(b)
    steps(eager)
    torch.compile(steps, fullgraph=True)(compiled)
    assert compiled.step == eager.step == 3
    for a, b in zip(compiled.params, eager.params, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"grads": [torch.ones(4)]}, "grads must have the shapes of params"),
        ({"grads": []}, "got 0 tensors for 1 parameters"),
        ({"exp_avgs": [torch.ones(1, 3)]}, "exp_avgs must have the shapes"),
        ({"copies": [torch.ones(3), torch.ones(3)]}, "copies must have the shapes"),
        ({"step": torch.tensor(1.0)}, "step must be int64, got torch.float32"),
        ({"grad_norm": torch.ones(2)}, r"grad_norm must have one element, got shape \(2,\)"),
        ({"found_inf": torch.ones(0)}, "found_inf must have one element"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict, message: str) -> None:
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs")
    arguments = {**{name: [torch.ones(3)] for name in names}, "step": torch.tensor(0), "grad_norm": torch.tensor(1.0)}
    with pytest.raises(ValueError, match=message):
        tempo.lamb_step_(**{**arguments, **changed}, lr=0.1)
    assert all((t[0] == 1).all() for name, t in arguments.items() if name in names)


def test_opcheck_of_the_reference_dtypes() -> None:
    group = Group([(3,), (2, 2)], 0.01, torch.float64)
    settings = (0.01, 0.9, 0.999, 1e-6, 0.01, 1.0, True, True)
    arguments = (group.params, group.gradients(1.0), *group.moments, [], group.step, torch.tensor(2.0), None, *settings)
    torch.library.opcheck(torch.ops.tempo.lamb_step_.default, arguments)
