"""The benchmark of the layers: its command line, every GPU case run on the CPU, and what it writes about times."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import tempo
from benchmarks import gpu_timing, layers, layers_gpu
from benchmarks.gpu_cases import Case, Sizes, builders
from benchmarks.layers_gpu import Row, measure, measure_all, report_text, share_of_copy, table, verdict

CPU = torch.device("cpu")
SMALL = Sizes(16, 24, 40, 2, (4, 8), optimizer_preset="bert_tiny", optimizer_layers=1)
FLOAT_BYTES = 4


class WallClock:
    def milliseconds(self, function: Callable[[], object]) -> float:
        start = time.perf_counter()
        function()
        return 1e3 * (time.perf_counter() - start)


class ScriptedClock:
    """Hands out given times, whatever runs."""

    def __init__(self, *milliseconds: float) -> None:
        self.left: Iterator[float] = iter(milliseconds)
        self.calls: list[object] = []

    def milliseconds(self, function: Callable[[], object]) -> float:
        self.calls.append(function())
        return next(self.left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_case_runs_and_its_bytes_are_those_of_the_formula(dtype: torch.dtype) -> None:
    """Bytes per element in 2-byte types: shared numbers of the README, here for any element size."""
    rows = measure_all(dtype, SMALL, CPU, WallClock(), rounds=1)
    size, wide, narrow = dtype.itemsize, 16 * 40, 16 * 24
    least = {(row.op, row.direction, row.size): row.min_bytes for row in rows}
    assert all(row.ours_ms is not None and row.theirs_ms is not None for row in rows)
    expected = {
        ("GELU (erf, 1 bit)", "forward", "16 x 40"): wide * 2 * size + wide // 8,
        ("GELU (erf, 1 bit)", "backward", "16 x 40"): wide * 3 * size + wide // 8,
        ("GELU (erf) and its output from the input", "backward", "16 x 40"): wide * 4 * size,
        ("LayerNorm", "forward", "16 x 24"): narrow * 2 * size + 16 * FLOAT_BYTES,
        ("LayerNorm", "backward", "16 x 24"): narrow * 3 * size + 16 * FLOAT_BYTES,
        ("dropout", "backward", "16 x 24"): narrow * 2 * size,
        ("bias, dropout, residual, LayerNorm", "forward", "16 x 24"): narrow * 3 * size + 16 * FLOAT_BYTES,
        ("bias, dropout, residual, LayerNorm", "backward", "16 x 24"): narrow * 4 * size + 16 * FLOAT_BYTES,
        ("softmax, dropout", "forward", "4 x 2 x 4 x 4"): 4 * 2 * 16 * 3 * size,
        ("softmax, dropout", "backward", "2 x 2 x 8 x 8"): 2 * 2 * 64 * 4 * size,
    }
    for key, value in expected.items():
        assert least[key] == value, key
    assert any(row.op == "LAMB" for row in rows) == (dtype == torch.float32)
    assert (("GELU (erf, 4 bit)", "forward", "16 x 40") in least) == (dtype != torch.float32)
    with_goal = {row.op.partition(" (")[0] for row in rows if row.has_goal}
    assert with_goal == {"GELU", "LayerNorm", "bias, dropout, residual, LayerNorm"}


def test_both_contestants_compute_the_same_where_nothing_is_drawn() -> None:
    for name in ("GELU (none, 1 bit)", "GELU (tanh, 1 bit)", "LayerNorm"):
        for case in builders(SMALL, torch.float32)[name](torch.float32, CPU):
            ours, theirs = case.ours(), case.theirs()
            first = [result[0] if isinstance(result, tuple) else result for result in (ours, theirs)]
            torch.testing.assert_close(*first, rtol=1e-3, atol=1e-3)


def test_a_case_is_timed_in_turns_after_a_warm_up_and_prepared_each_time() -> None:
    prepared: list[int] = []
    case = Case("op", "forward", "1 x 1", 100, lambda: "ours", lambda: "theirs", before=lambda: prepared.append(1))
    warm_up = [1e9] * 2 * 3
    clock = ScriptedClock(*warm_up, 1.0, 10.0, 5.0, 30.0, 3.0, 20.0)
    row = measure(case, clock, rounds=3)
    assert (row.ours_ms, row.theirs_ms) == (3.0, 20.0)
    assert clock.calls == ["ours", "theirs"] * 6
    assert len(prepared) == 12


def test_the_copy_counts_bytes_read_and_written() -> None:
    clock = ScriptedClock(*[9.0] * 3, 2.0, 2.0)
    assert gpu_timing.copy_bytes_per_second(CPU, clock, rounds=2, num_bytes=4000) == pytest.approx(2 * 4000 / 2e-3)


def test_a_case_that_does_not_fit_is_said_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(dtype: torch.dtype, device: torch.device) -> list[Case]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def fits(dtype: torch.dtype, device: torch.device) -> list[Case]:
        return [Case("small", "forward", "1", 8, lambda: None, lambda: None)]

    monkeypatch.setattr(layers_gpu, "builders", lambda sizes, dtype: {"large": too_large, "small": fits})
    rows = measure_all(torch.float32, SMALL, CPU, WallClock(), rounds=1)
    assert [(row.op, row.ours_ms is None) for row in rows] == [("large", True), ("small", False)]
    assert "| large | | | | out of memory |" in table(rows, 1e12)[2]


ROWS = [
    Row("GELU (erf, 1 bit)", "forward", "65536 x 4096", 1_000_000_000, True, 0.5, 0.6),  # 2000 GB/s
    Row("LayerNorm", "backward", "65536 x 1024", 400_000_000, True, 0.25, 1.0),  # 1600 GB/s
    Row("dropout", "forward", "65536 x 1024", 200_000_000, False, 1.0, 0.5),
    Row("softmax, dropout S 512", "", "", 0, False, None, None),
]


def test_the_table_says_bandwidth_share_and_goal() -> None:
    lines = table(ROWS, copy_speed=2.0e12)
    assert len({line.count("|") for line in lines}) == 1
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert cells[0][3:] == ["1,000", "0.500", "2,000", "100%", "85% met", "0.600", "1.20"]
    assert cells[1][3:] == ["400", "0.250", "1,600", "80%", "85% missed", "1.000", "4.00"]
    assert cells[2][6:] == ["10%", "", "0.500", "0.50"]
    assert share_of_copy(ROWS[1], 2.0e12) == pytest.approx(0.8)
    assert verdict(ROWS, 2.0e12) == "goal of 85% of the copy speed: met by 1 of 2; lowest 80% (LayerNorm, backward)"
    assert verdict(ROWS[2:], 2.0e12) == "no op with a goal was measured"


def test_the_report_names_machine_versions_command_and_each_dtype() -> None:
    text = report_text(
        ["- machine: Fake GPU"], "python -m benchmarks.layers", 20, Sizes(), 2.0e12, {"float16": ROWS, "float32": ROWS}
    )
    for part in (
        "- machine: Fake GPU",
        "`python -m benchmarks.layers`",
        "65,536 tokens, S 128 and 512",
        "copy speed: 2,000 GB/s",
    ):
        assert part in text
    assert re.findall(r"^## (\w+)$", text, flags=re.MULTILINE) == ["float16", "float32"]
    assert text.count("met by 1 of 2") == 2


def test_small_devices_take_fewer_tokens() -> None:
    assert Sizes.for_memory(16 << 30).tokens == 16_384
    assert Sizes.for_memory(80 << 30).tokens == 65_536


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--threads", "-1"], "--threads must be at least 1"),
        (["--tokens", "0"], "--tokens must be at least 1"),
        (["--device", "tpu"], "--device must be cpu, cuda or cuda:N, got 'tpu'"),
        (["--device", "cuda:7"], "CUDA device(s)"),
        (["--dtype", "float64"], "invalid choice"),
    ],
)
def test_wrong_arguments_end_with_a_sentence(given: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        layers.parse(given)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("count", "given", "device"), [(0, [], "cpu"), (2, [], "cuda:0"), (2, ["--device", "cuda:1"], "cuda:1")])
def test_the_device_is_a_gpu_where_there_is_one(
    count: int, given: list[str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert layers.parse(given).device == device


def test_results_are_named_after_the_machine() -> None:
    name = layers.output_path("NVIDIA H200 (80 GB)").name
    assert re.fullmatch(r"layers_nvidia-h200-80-gb_\d{4}-\d\d-\d\d\.md", name)


class FakeProperties:
    name, major, minor, total_memory, L2_cache_size = "Fake GPU", 9, 0, 64 << 30, 50 << 20


def test_the_whole_report_is_written_to_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the CPU, with all that only a GPU answers replaced."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fake GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: FakeProperties)
    monkeypatch.setattr(layers_gpu, "CudaClock", lambda device: WallClock())
    monkeypatch.setattr(layers_gpu, "copy_bytes_per_second", lambda device, clock, rounds: 1e12)
    monkeypatch.setattr(layers_gpu, "measure_all", lambda dtype, *rest: ROWS)
    monkeypatch.setattr(layers, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["layers", "--device", "cuda", "--tokens", "32", "--output"])
    layers.main()
    (written,) = tmp_path.iterdir()
    assert written.name.startswith("layers_fake-gpu_")
    text = written.read_text()
    for part in (
        "Fake GPU, compute capability 9.0, 64 GiB",
        "32 tokens",
        "## float16",
        "`python -m benchmarks.layers --device cuda",
    ):
        assert part in text
    assert set(re.findall(r"PyTorch references: (.*)", text)[0].split(", ")) <= {*tempo.kernels.summary("cuda"), "none"}


def test_the_driver_is_unknown_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_timing.driver_version() == "unknown"
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 580.65.06\necho 580.65.06\n")
    tool.chmod(0o755)
    assert gpu_timing.driver_version() == "580.65.06"
