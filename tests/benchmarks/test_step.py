"""The search for the largest micro-batch, and what the benchmark of a step writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks import step
from benchmarks.step import Result, largest_batch, measure_length, table


def never() -> bool:
    return False


@pytest.mark.parametrize("largest", [0, 1, 2, 3, 7, 8, 9, 31, 100, 1000, 4096])
def test_the_largest_batch_is_found_to_a_sixteenth(largest: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= largest

    found, is_exact = largest_batch(fits, 4096, never)
    assert is_exact
    assert found <= largest <= found + max(1, found // 16)
    assert len(tried) == len(set(tried)) <= 16
    assert all(1 <= batch <= 4096 for batch in tried)


def test_the_search_ends_when_it_is_late() -> None:
    late = iter([False, False, True])
    assert largest_batch(lambda batch: True, 4096, lambda: next(late)) == (16, False)
    assert largest_batch(lambda batch: True, 4096, lambda: True) == (0, False)


class PretendedStack:
    """Fits up to `largest`; a step of a batch takes a hundredth of a second per sequence."""

    def __init__(self, largest: int, fails_above: int | None = None) -> None:
        self.largest, self.fails_above = largest, fails_above
        self.measured: list[int] = []

    def fits(self, batch: int) -> bool:
        return batch <= self.largest

    def measure(self, batch: int) -> tuple[float, int]:
        if self.fails_above is not None and batch > self.fails_above:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.measured.append(batch)
        return 100.0 + batch, batch << 30


def test_the_second_kind_is_also_measured_at_the_batch_of_the_first() -> None:
    stacks = {"torch": PretendedStack(32), "tempo": PretendedStack(64)}
    first, second = measure_length(128, ["torch", "tempo"], lambda kind, length: stacks[kind], 4096, 60.0)
    assert (first.batch, first.peak_bytes, first.sequences_per_second, first.at_common_batch) == (32, 32 << 30, 132.0, None)
    assert (second.batch, second.sequences_per_second, second.at_common_batch) == (64, 164.0, 132.0)
    assert stacks["tempo"].measured == [64, 32]


def test_a_batch_that_fitted_once_and_then_not_gives_way_to_a_smaller_one() -> None:
    stack = PretendedStack(64, fails_above=62)
    (result,) = measure_length(128, ["torch"], lambda kind, length: stack, 4096, 60.0)
    assert result.batch == 60
    assert result.sequences_per_second == 160.0


def test_where_nothing_fits_nothing_is_measured() -> None:
    (result,) = measure_length(128, ["torch"], lambda kind, length: PretendedStack(0), 4096, 60.0)
    assert (result.batch, result.sequences_per_second) == (0, 0.0)
    assert "| 128 | torch | 0 |" in table([result])[2]


def test_the_table_says_how_much_larger_and_faster() -> None:
    rows = table([Result(128, "torch", 100, True, 64 << 30, 500.0), Result(128, "tempo", 180, False, 63 << 30, 600.0, 510.0)])
    assert rows[2] == "| 128 | torch | 100 | 64.0 GiB | 500.0 |  |"
    assert rows[3] == "| 128 | tempo | 180 or more (1.80 x) | 63.0 GiB | 600.0 (1.20 x) | 510.0 |"


def test_a_small_model_on_the_cpu_from_the_command_line_to_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "_MEASURE_SECONDS", 0.0)
    path = tmp_path / "new/step.md"
    sizes = ["--preset", "bert_tiny", "--num-layers", "1", "--lengths", "8", "16", "--max-batch", "3"]
    step.main(["--device", "cpu", *sizes, "--output", str(path)])
    text = path.read_text()
    assert text in capsys.readouterr().out
    assert "bert_tiny: 1 layers, hidden size 128" in text
    assert re.findall(r"^\| (\d+) \| (\w+) \| 3", text, flags=re.MULTILINE) == [
        ("8", "torch"),
        ("8", "tempo"),
        ("16", "torch"),
        ("16", "tempo"),
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--device", "cuda:9"], "CUDA device(s)"),
        (["--device", "tpu"], "got 'tpu'"),
        (["--device", "cpu"], "needs --max-batch"),
        (["--seconds", "0"], "--seconds must be positive, got 0"),
        (["--num-layers", "-2"], "--num-layers must be positive"),
        (["--lengths", "513"], "--lengths must lie between 1 and 512"),
        (["--layers", "other"], "invalid choice"),
    ],
)
def test_wrong_arguments_end_with_a_sentence(given: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        step.parse(given)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
