from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pretrain import compare
from pretrain.plotting import draw_losses, new_figure, plot_run, smooth

ROOT = Path(__file__).parents[2]


def write_run(path: Path, losses: list[float], first: int = 1, **environment: float) -> Path:
    path.mkdir(parents=True)
    rows = [
        {
            "step": first + i,
            "samples": 8 * (first + i),
            "tokens": 900 * (first + i),
            "loss": loss,
            "mlm_accuracy": 0.01 * i,
            "sequences_per_second": 100.0 + i,
            "peak_memory_bytes": 2**30,
            **({"eval_loss": loss, "eval_mlm_loss": loss - 0.5} if i % 2 else {}),
        }
        for i, loss in enumerate(losses)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if environment:
        (path / "environment.json").write_text(json.dumps(environment))
    return path


def run_process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pretrain.compare", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The same inside this process: starting Python a second or two for each of these tests is not worth it."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = compare.main([str(argument) for argument in arguments])
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


def test_table_differences_json_and_picture(tmp_path: Path) -> None:
    a = write_run(tmp_path / "base", [9.0, 8.0, 7.0, 6.0], saved_bytes_per_token=49160.0)
    b = write_run(tmp_path / "tempo", [9.0, 8.5, 6.9, 6.25], saved_bytes_per_token=25161.0)
    done = run_process(a, b, "--output", tmp_path / "c.png", "--json", tmp_path / "c.json")
    assert done.returncode == 0, done.stderr
    for text in ("base", "tempo", "6.2500", "49,160", "25,161", "+0.5000", "+0.2500", "c.png"):
        assert text in done.stdout
    numbers = json.loads((tmp_path / "c.json").read_text())
    assert numbers[0]["largest_difference"] is None
    assert (numbers[1]["largest_difference"], numbers[1]["final_difference"]) == (0.5, 0.25)
    assert numbers[1]["eval_mlm_loss"] == 5.75
    with Image.open(tmp_path / "c.png") as picture:
        assert picture.width > 1000
        assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 50


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / side / "run", [3.0, 2.0]) for side in ("left", "right")]
    done = run(*runs, "--output", tmp_path / "c.png")
    assert "left/run" in done.stdout
    assert "right/run" in done.stdout


def test_one_run_and_runs_without_common_steps_are_fine(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", [3.0, 2.0]), write_run(tmp_path / "b", [3.0, 2.0], first=50)
    assert run(a, "--output", tmp_path / "one.png").returncode == 0
    done = run(a, b, "--output", tmp_path / "two.png")
    assert done.returncode == 0
    assert "no step in common" in done.stdout


def test_a_last_line_cut_short_is_left_out(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [3.0, 2.0])
    with (a / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    done = run_process(a, "--output", tmp_path / "c.png")
    assert done.returncode == 0
    assert "cut short" in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "not a run directory"),
        ("", "has not logged a step yet"),
        ('{"step": 1}\nnonsense\n{"step": 2}\n', "line 2"),
        ('{"step": 1}\n\xff\n{"step": 2}\n', "line 2"),
        ('{"step": 1, "loss": 1}\n{"step": 2}\n', "line 2 (step 2) has no loss"),
    ],
)
def test_what_is_no_run_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    if content is not None:
        (folder / "metrics.jsonl").write_text(content, encoding="latin-1")
    done = run(folder, "--output", tmp_path / "c.png")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "c.png").exists()


@pytest.mark.parametrize("name", ["a$b", "_run", "run[red]1", "$x$_{"])
def test_odd_names_are_shown_as_they_are(tmp_path: Path, name: str) -> None:
    """matplotlib reads $ as mathematics and leaves names with _ out of the legend; rich reads brackets as colours."""
    paths = [write_run(tmp_path / name, [3.0, 2.0]), write_run(tmp_path / "b", [3.0, 2.0])]
    done = run(*paths, "--output", tmp_path / "c.png")
    assert done.returncode == 0, done.stderr
    assert name in done.stdout
    assert done.stderr == ""
    _, parts = new_figure([["loss"]], 4, 3)
    draw_losses(parts["loss"], {name: [{"step": 1, "loss": 1.0}]}, "step")
    shown = [text.get_text() for text in parts["loss"].get_legend().get_texts()]
    assert [text.replace(r"\$", "$").strip("\u200b") for text in shown] == [name]


def test_one_directory_given_twice_is_two_rows(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [3.0, 2.0])
    done = run(path, path, "--output", tmp_path / "c.png")
    assert "run (2)" in done.stdout


def test_metrics_of_others_with_little_in_them_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "bare"
    path.mkdir()
    (path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": NaN}\n')
    other = write_run(tmp_path / "b", [3.0, 2.0])
    done = run(path, other, "--output", tmp_path / "c.png", "--json", tmp_path / "new" / "c.json", "--smooth", "2")
    assert done.returncode == 0, done.stderr
    bare, full = json.loads((tmp_path / "new" / "c.json").read_text())
    assert (bare["sequences_per_second"], bare["peak_memory_bytes"], bare["final_loss"]) == (None, None, None)
    assert full["largest_difference"] is None  # not a number, which JSON has no word for


def test_small_differences_are_not_shown_as_none(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", [3.0, 2.0]), write_run(tmp_path / "b", [3.0, 2.0 + 3e-7])
    assert "+3.0e-07" in run(a, b, "--output", tmp_path / "c.png").stdout


def test_what_differs_in_the_configurations_is_named(tmp_path: Path) -> None:
    for name, layers in (("a", "torch"), ("b", "tempo")):
        path = write_run(tmp_path / name, [3.0, 2.0])
        (path / "config.yaml").write_text(f"model: {{layers: {layers}, gelu: erf}}\ntrain: {{output_dir: {name}}}\n")
    done = run(tmp_path / "a", tmp_path / "b", "--output", tmp_path / "c.png")
    assert "model.layers: torch | tempo" in done.stdout
    assert "gelu" not in done.stdout
    assert "output_dir" not in done.stdout


@pytest.mark.parametrize(("name", "content"), [("environment.json", "{"), ("config.yaml", "a: [")])
def test_a_broken_file_beside_the_metrics_is_named(tmp_path: Path, name: str, content: str) -> None:
    path = write_run(tmp_path / "a", [3.0, 2.0])
    (path / name).write_text(content)
    done = run(path, "--output", tmp_path / "c.png")
    assert done.returncode == 2
    assert f"error: {path / name} cannot be read" in done.stderr


@pytest.mark.parametrize("where", ["--output", "--json"])
def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path, where: str) -> None:
    path = write_run(tmp_path / "a", [3.0, 2.0])
    (tmp_path / "file").write_text("")
    for target in (tmp_path, tmp_path / "file" / "c"):
        done = run(path, "--output", tmp_path / "c.png", where, target)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert str(target) in done.stderr or "file" in done.stderr
    assert not list(tmp_path.rglob("*.part"))


def test_nothing_to_compare_is_said(tmp_path: Path) -> None:
    done = run_process()
    assert done.returncode == 2
    assert "give run directories" in done.stderr


def test_a_wandb_project_is_read_through_its_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [json.loads(line) for line in (write_run(tmp_path / "r", [4.0, 3.0]) / "metrics.jsonl").read_text().splitlines()]

    class Api:
        def __init__(self, timeout: int) -> None:
            pass

        def runs(self, project: str, filters: dict | None) -> list:
            assert (project, filters) == ("team/bert", {"group": "g"})
            history = [{**row, "_step": row["step"]} for row in rows]
            return [types.SimpleNamespace(name="online", scan_history=lambda: history)]

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(Api=Api))
    (loaded,) = compare.load_wandb("team/bert", "g")
    assert loaded.name == "online"
    assert compare.summarise(loaded, loaded).final_loss == 3.0


def test_an_unreachable_wandb_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def api(timeout: int) -> None:
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(Api=api))
    with pytest.raises(ValueError, match=r"cannot read 'team/bert' from wandb \(no route\); give run directories"):
        compare.load_wandb("team/bert", None)


def test_a_run_draws_its_own_curve(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", [3.0, 2.0, 1.5])
    assert plot_run(path) == path / "loss_curve.png"
    with Image.open(path / "loss_curve.png") as picture:
        assert picture.format == "PNG"
    (tmp_path / "empty").mkdir()
    assert plot_run(tmp_path / "empty") is None


def test_smoothing_is_the_mean_of_the_last_points() -> None:
    assert smooth([4.0, 2.0, 0.0, 6.0], 2) == [4.0, 3.0, 1.0, 3.0]
    assert smooth([1.0, 2.0], 1) == [1.0, 2.0]
    assert smooth([1.0, float("nan"), 1.0, 3.0], 2)[3] == 2.0


def test_a_picture_that_cannot_be_drawn_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_run(tmp_path / "a", [3.0, 2.0])
    (path / "loss_curve.png").mkdir()
    assert plot_run(path) is None
    assert "training goes on" in caplog.text


def test_curves_that_coincide_are_both_seen() -> None:
    """The first solid and thick, the next dashed and thinner above it, so both colours show."""
    figure, parts = new_figure([["loss"]], 4, 3)
    rows = [{"step": step, "loss": 3.0 - step} for step in range(3)]
    draw_losses(parts["loss"], {"a": rows, "b": rows}, "step")
    solid, dashed = (line for line in parts["loss"].lines if line.get_label() in "ab")
    assert (solid.get_linestyle(), dashed.get_linestyle()) == ("-", "--")
    assert solid.get_linewidth() > 2 * dashed.get_linewidth()
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3].astype(int)
    blue = (pixels[..., 2] > 150) & (pixels[..., 0] < 100)
    red = (pixels[..., 0] > 180) & (pixels[..., 2] < 100)
    assert blue.sum() > 100
    assert red.sum() > 100
