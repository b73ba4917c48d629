from __future__ import annotations

import importlib.util
import math
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.bert import BertForPreTraining
from models.config import BertConfig
from pretrain.optimizer import Lamb, build_optimizer, global_grad_norm, parameter_groups

BETAS, EPS, CLIP = (0.9, 0.999), 1e-6, 1.0


class Float64Lamb:
    """LAMB written down in float64, one parameter at a time, from DESIGN's definition."""

    def __init__(self, groups: list[tuple[list[torch.Tensor], float]], nvlamb: bool) -> None:
        self.groups = [([w.detach().double().clone() for w in ws], decay) for ws, decay in groups]
        self.state = [[(torch.zeros_like(w), torch.zeros_like(w)) for w in ws] for ws, _ in self.groups]
        self.t, self.nvlamb = 0, nvlamb

    def step(self, gradients: list[list[torch.Tensor]], lr: float) -> None:
        self.t += 1
        norm = math.sqrt(sum(float((g.double() ** 2).sum()) for gs in gradients for g in gs))
        for (weights, decay), state, gs in zip(self.groups, self.state, gradients, strict=True):
            for w, (m, v), g in zip(weights, state, gs, strict=True):
                g = g.double() / max(1.0, norm / CLIP)
                m.mul_(BETAS[0]).add_(g, alpha=1 - BETAS[0])
                v.mul_(BETAS[1]).add_(g * g, alpha=1 - BETAS[1])
                u = (m / (1 - BETAS[0] ** self.t)) / ((v / (1 - BETAS[1] ** self.t)).sqrt() + EPS) + decay * w
                ratio = 1.0
                if (decay != 0 or self.nvlamb) and w.norm() > 0 and u.norm() > 0:
                    ratio = float(w.norm() / u.norm())
                w.sub_(lr * ratio * u)


def two_groups(dtype: torch.dtype = torch.float32) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    torch.manual_seed(0)
    decayed = [torch.randn(7, 5) * 0.1, torch.zeros(4, 3), torch.randn(33)]
    undecayed = [torch.randn(6), torch.zeros(2)]
    return [nn.Parameter(w.to(dtype)) for w in decayed], [nn.Parameter(w.to(dtype)) for w in undecayed]


def make_lamb(decayed: list[nn.Parameter], undecayed: list[nn.Parameter], nvlamb: bool = False) -> Lamb:
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": undecayed, "weight_decay": 0.0}]
    return Lamb(groups, lr=0.01, betas=BETAS, eps=EPS, max_grad_norm=CLIP, nvlamb=nvlamb)


@pytest.mark.parametrize("nvlamb", [False, True])
def test_lamb_equals_the_float64_reference_for_100_steps(nvlamb: bool) -> None:
    """Two groups, decay on and off, a zero weight, zero gradients, and skipped steps that must change nothing."""
    decayed, undecayed = two_groups()
    optimizer = make_lamb(decayed, undecayed, nvlamb)
    reference = Float64Lamb([(decayed, 0.01), (undecayed, 0.0)], nvlamb)
    generator = torch.Generator().manual_seed(1)
    for step in range(100):
        scale = 10.0 ** (step % 4 - 2)  # below and above the clipping norm
        gradients = [[torch.randn(p.shape, generator=generator) * scale for p in ps] for ps in (decayed, undecayed)]
        if step % 10 == 3:
            gradients = [[torch.zeros_like(g) for g in gs] for gs in gradients]
        gradients[0][1].zero_()  # a weight that is zero and stays without gradient
        for ps, gs in zip((decayed, undecayed), gradients, strict=True):
            for p, g in zip(ps, gs, strict=True):
                p.grad = g.clone()
        if step % 7 == 5:
            continue  # an overflow: the trainer does not call step
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        optimizer.step()
        reference.step(gradients, 0.01 / (1 + step))
    for ours, true in zip((decayed, undecayed), (ws for ws, _ in reference.groups), strict=True):
        for p, w in zip(ours, true, strict=True):
            torch.testing.assert_close(p.double(), w, rtol=2e-5, atol=2e-6)


def load_timm_lamb() -> type[torch.optim.Optimizer]:
    """timm.optim.lamb alone: the package itself wants torchvision."""
    spec = importlib.util.find_spec("timm")
    assert spec is not None, "timm is missing: pip install --no-deps timm==1.0.31 (scripts/test.sh does)"
    folder = Path(str(spec.submodule_search_locations[0])) / "optim"  # type: ignore[index]
    for name in ("timm", "timm.optim"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder if name.endswith("optim") else folder.parent)]
        sys.modules.setdefault(name, package)
    try:
        return importlib.import_module("timm.optim.lamb").Lamb
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == "timm"]:
            del sys.modules[name]


@pytest.mark.parametrize("nvlamb", [False, True])
@pytest.mark.parametrize("bias_correction", [False, True])
def test_lamb_equals_timms_where_the_definitions_meet(nvlamb: bool, bias_correction: bool) -> None:
    """Theirs with its defaults: averaged gradients, decay inside the update, no bound on the ratio; nvlamb is always_adapt."""
    ours, theirs = two_groups(), two_groups()
    optimizer = make_lamb(*ours, nvlamb)
    optimizer.bias_correction = bias_correction
    groups = [{"params": theirs[0], "weight_decay": 0.01}, {"params": theirs[1], "weight_decay": 0.0}]
    settings = {"always_adapt": nvlamb, "bias_correction": bias_correction}
    other = load_timm_lamb()(groups, lr=0.01, betas=BETAS, eps=EPS, max_grad_norm=CLIP, **settings)
    generator = torch.Generator().manual_seed(2)
    for _ in range(50):
        for ours_group, theirs_group in zip(ours, theirs, strict=True):
            for a, b in zip(ours_group, theirs_group, strict=True):
                a.grad = torch.randn(a.shape, generator=generator)
                b.grad = a.grad.clone()
        optimizer.step()
        other.step()
    for ours_group, theirs_group in zip(ours, theirs, strict=True):
        for a, b in zip(ours_group, theirs_group, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_gradient_itself_is_not_touched() -> None:
    decayed, undecayed = two_groups()
    optimizer = make_lamb(decayed, undecayed)
    for p in decayed + undecayed:
        p.grad = torch.full_like(p, 100.0)
    optimizer.step()
    assert all((p.grad == 100.0).all() for p in decayed + undecayed)


def test_a_given_norm_is_used() -> None:
    results = []
    for norm in (None, torch.tensor(1.0), torch.tensor(50.0)):
        decayed, undecayed = two_groups()
        optimizer = make_lamb(decayed, undecayed)
        for p in decayed + undecayed:
            p.grad = torch.full_like(p, 0.01)
        optimizer.step(grad_norm=norm)
        results.append(optimizer.state[decayed[0]]["exp_avg"].clone())
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[2], results[0] / 50)


def test_parameters_without_gradient_stay() -> None:
    decayed, undecayed = two_groups()
    optimizer = make_lamb(decayed, undecayed)
    before = decayed[0].detach().clone()
    decayed[2].grad = torch.ones_like(decayed[2])
    optimizer.step()
    assert torch.equal(decayed[0].detach(), before)
    assert optimizer.state[decayed[0]] == {}


def test_16_bit_parameters_have_float32_moments() -> None:
    p = nn.Parameter(torch.ones(64).bfloat16())
    optimizer = Lamb([p], lr=0.1)
    p.grad = torch.full_like(p, 0.5)
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].dtype == torch.float32
    assert p.dtype == torch.bfloat16
    assert (p < 1).all()


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = Lamb(embedding.parameters(), lr=0.1)
    embedding(torch.tensor([1, 2])).sum().backward()
    for norm in (torch.tensor(1.0), None):
        with pytest.raises(ValueError, match="sparse=False"):
            optimizer.step(grad_norm=norm)
    assert optimizer.param_groups[0]["step"] == 0
    assert not optimizer.state


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "negative"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"eps": -1e-3}, "negative"),
        ({"lr": math.nan}, "negative"),
        ({"max_grad_norm": -1.0}, "negative"),
    ],
)
def test_wrong_settings_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lamb([nn.Parameter(torch.ones(2))], **arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_survives_a_round_trip_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    def steps(optimizer: Lamb, parameters: list[nn.Parameter], seeds: range) -> None:
        for seed in seeds:
            for i, p in enumerate(parameters):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * seed + i)).to(dtype)
            optimizer.step()

    decayed, undecayed = two_groups(dtype)
    optimizer = make_lamb(decayed, undecayed)
    steps(optimizer, decayed + undecayed, range(5))
    torch.save({"o": optimizer.state_dict(), "w": [p.detach() for p in decayed + undecayed]}, tmp_path / "s.pt")
    steps(optimizer, decayed + undecayed, range(5, 9))

    saved = torch.load(tmp_path / "s.pt", weights_only=True)
    again = two_groups(dtype)
    resumed = make_lamb(*again)
    resumed.load_state_dict(saved["o"])
    for p, w in zip(again[0] + again[1], saved["w"], strict=True):
        p.data.copy_(w)
    steps(resumed, again[0] + again[1], range(5, 9))
    for a, b in zip(decayed + undecayed, again[0] + again[1], strict=True):
        assert torch.equal(a, b)


def test_global_norm_is_over_all_gradients() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(3))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert global_grad_norm(parameters) == 5.0
    assert global_grad_norm([parameters[2]]) == 0.0


@pytest.mark.parametrize("layers", ["torch", "tempo"])
def test_biases_and_layer_norms_do_not_decay_in_any_mode(layers: str) -> None:
    model = BertForPreTraining(BertConfig.preset("bert_tiny", vocab_size=50, layers=layers))
    decayed, undecayed = parameter_groups(model, 0.01)
    names = {id(p): name for name, p in model.named_parameters()}
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.01, 0.0)
    expected = {name for name in names.values() if name.endswith("bias") or "LayerNorm" in name}
    assert {names[id(p)] for p in undecayed["params"]} == expected
    assert len(decayed["params"]) + len(undecayed["params"]) == len(names)


def test_an_unknown_optimizer_is_named() -> None:
    with pytest.raises(ValueError, match=r"optimizer\.name must be one of lamb, adamw"):
        build_optimizer(nn.Linear(2, 2), name="sgd", learning_rate=1, betas=BETAS, eps=1e-6, weight_decay=0.0, max_grad_norm=1.0)


def test_a_grad_scaler_skips_a_step_with_infinite_gradients_whole() -> None:
    """Through GradScaler.step, which passes the norm on; a skipped step changes no weight, no moment and no count."""
    decayed, undecayed = two_groups()
    optimizer, scaler = make_lamb(decayed, undecayed), torch.amp.GradScaler("cpu", init_scale=4.0)
    counts = []
    for value in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        loss = sum((p * value).sum() for p in decayed + undecayed)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        before = [p.detach().clone() for p in decayed + undecayed]
        moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
        scaler.step(optimizer, grad_norm=global_grad_norm(decayed + undecayed))
        scaler.update()
        counts.append(int(optimizer.param_groups[0]["step"]))
        if math.isinf(value):
            assert all(torch.equal(a, b) for a, b in zip(before, decayed + undecayed, strict=True))
            assert all(torch.equal(a, s["exp_avg"]) for a, s in zip(moments, optimizer.state.values(), strict=True))
    assert counts == [1, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_grad_scaler_leaves_unscaling_to_the_optimizer(dtype: torch.dtype) -> None:
    """`scaler.step` without `unscale_` before it: as without a scaler, and 16-bit gradients are taken too."""
    results = []
    for scale in (None, 2.0**9):
        decayed, undecayed = two_groups(dtype)
        optimizer = make_lamb(decayed, undecayed)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for value in (1.0, 0.125):
            optimizer.zero_grad()
            scaler.scale(sum((p * p * value).sum() for p in decayed + undecayed)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert not {"grad_scale", "found_inf"} & set(vars(optimizer))
        results.append([*decayed, *undecayed, *(state["exp_avg_sq"] for state in optimizer.state.values())])
    for plain, scaled in zip(*results, strict=True):
        torch.testing.assert_close(scaled, plain)


def test_a_scaler_that_finds_an_overflow_by_itself_skips_the_step_whole() -> None:
    decayed, undecayed = two_groups()
    optimizer, scaler = make_lamb(decayed, undecayed), torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in decayed + undecayed]
    scaler.scale(sum((p * torch.tensor(3e38) * 10).sum() for p in decayed + undecayed)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, decayed + undecayed, strict=True))
    assert [int(group["step"]) for group in optimizer.param_groups] == [0, 0]
    assert scaler.get_scale() == 2.0


def test_steps_do_not_wait_for_the_device() -> None:
    """Nothing in a step reads a value of a tensor, whatever its result."""
    decayed, undecayed = two_groups()
    optimizer, scaler = make_lamb(decayed, undecayed), torch.amp.GradScaler("cpu", init_scale=4.0)
    for value in (1.0, math.nan, 1.0):
        optimizer.zero_grad()
        scaler.scale(sum((p * value).sum() for p in decayed + undecayed)).backward()
        with CountCalls() as count:
            scaler.step(optimizer)
        scaler.update()
        assert "tempo.lamb_step_" in str(count.names)
        assert not {name for name in count.names if "_local_scalar_dense" in name or "nonzero" in name}


def test_steps_are_an_int_in_checkpoints_and_may_be_one_or_a_tensor_there() -> None:
    results = []
    for convert in (int, torch.tensor):
        decayed, undecayed = two_groups()
        optimizer = make_lamb(decayed, undecayed)
        for _ in range(3):
            for p in decayed + undecayed:
                p.grad = torch.full_like(p, 0.1)
            optimizer.step()
        saved = optimizer.state_dict()
        assert [group["step"] for group in saved["param_groups"]] == [3, 3]
        assert all(type(group["step"]) is int for group in saved["param_groups"])
        for group in saved["param_groups"]:
            group["step"] = convert(group["step"])
        resumed = make_lamb(decayed, undecayed)
        resumed.load_state_dict(saved)
        resumed.step()
        assert [int(group["step"]) for group in resumed.param_groups] == [4, 4]
        assert [int(group["step"]) for group in optimizer.param_groups] == [3, 3]
        results.append([p.detach() for p in decayed + undecayed])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_norm_that_is_not_finite_changes_nothing() -> None:
    decayed, undecayed = two_groups()
    optimizer = make_lamb(decayed, undecayed)
    for p in decayed + undecayed:
        p.grad = torch.ones_like(p)
    optimizer.step()
    undecayed[0].grad = torch.full_like(undecayed[0], math.nan)  # of one group; the other does not step either
    before = [p.detach().clone() for p in decayed + undecayed]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, decayed + undecayed, strict=True))
    assert [int(group["step"]) for group in optimizer.param_groups] == [1, 1]


def test_sharded_parameters_are_updated_by_pytorch_s_operations(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        results = []
        for shard in (False, True):
            decayed, undecayed = two_groups()
            if shard:
                decayed, undecayed = (
                    [nn.Parameter(distribute_tensor(p.detach(), mesh)) for p in ps] for ps in (decayed, undecayed)
                )
            optimizer = make_lamb(decayed, undecayed)
            for _ in range(3):
                for p in decayed + undecayed:
                    p.grad = torch.ones_like(p)
                optimizer.step()
            results.append([p.full_tensor() if shard else p.detach() for p in decayed + undecayed])
        for plain, sharded in zip(*results, strict=True):
            torch.testing.assert_close(sharded, plain)
    finally:
        torch.distributed.destroy_process_group()


def test_the_number_of_operations_does_not_grow_with_the_number_of_parameters() -> None:
    def calls(num_parameters: int) -> int:
        parameters = [nn.Parameter(torch.ones(3)) for _ in range(num_parameters)]
        optimizer = Lamb(parameters, lr=0.1)
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()  # makes the moments
        with CountCalls() as count:
            optimizer.step(grad_norm=torch.tensor(1.0))
        return len(count.names)

    assert calls(40) == calls(2) > 0


class CountCalls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_tied_parameter_comes_once_and_frozen_ones_not_at_all() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3, bias=False), "norm": nn.LayerNorm(3)})
    model["b"].weight = model["a"].weight
    model["norm"].weight.requires_grad_(False)
    decayed, undecayed = parameter_groups(model, 0.1)
    assert [id(p) for p in decayed["params"]] == [id(model["a"].weight)]
    assert {id(p) for p in undecayed["params"]} == {id(model["a"].bias), id(model["norm"].bias)}


def test_adamw_decays_the_same_parameters() -> None:
    settings = {"learning_rate": 1e-3, "betas": BETAS, "eps": EPS, "weight_decay": 0.1, "max_grad_norm": 1.0}
    optimizer = build_optimizer(nn.Linear(2, 2), name="adamw", **settings)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [(len(g["params"]), g["weight_decay"], g["betas"]) for g in optimizer.param_groups] == [
        (1, 0.1, BETAS),
        (1, 0.0, BETAS),
    ]
