"""Every command of the README is run here, or says that it needs a GPU, the network or Docker.

A command written for a big machine runs with a small model and small data: what the test adds or replaces is in this file.
"""

from __future__ import annotations

import bz2
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = sys.executable
SMALL = (
    "--train.device cpu --train.precision fp32 --train.max_steps 2 --train.global_batch_size 4 --train.micro_batch_size 2"
    " --train.eval_samples 8 --data.num_workers 0 --model.hidden_size 32 --model.num_heads 2 --model.intermediate_size 64"
    " --model.num_layers 2 --train.num_threads 1"
)
# What cannot run in a test, by what it starts with.
NOT_HERE = {
    "docker ": "needs Docker",
    "bash scripts/test.sh": "is what runs this",
    "bash scripts/quickstart.sh": "has a test of its own below",
}


def commands() -> list[str]:
    """The lines of the README's bash blocks, continued lines joined, comments cut."""
    blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").split("\n")
    return [cut for line in lines if (cut := re.sub(r"\s{2,}", " ", re.sub(r"\s#.*", "", line)).strip())]


def write_dump(path: Path, num_articles: int = 40) -> None:
    """A MediaWiki dump with articles long enough for pairs at S = 512."""

    def article(i: int) -> str:
        return " ".join(f"Article {i} says in sentence {j} that the number {i * j} is neither red nor blue." for j in range(60))

    pages = "".join(
        f"<page><title>A{i}</title><ns>0</ns><revision><text>{article(i)}</text></revision></page>" for i in range(num_articles)
    )
    path.write_bytes(bz2.compress(f"<mediawiki>{pages}</mediawiki>".encode()))


def adapted(command: str) -> list[str]:
    """The command as it runs here: small, on one CPU."""
    words = shlex.split(command)
    if words[0] == "python":
        words[0] = PYTHON
    if words[0] == "torchrun":
        words = [PYTHON, "-m", "torch.distributed.run", *words[1:]]
        words[words.index("--nproc-per-node") + 1] = "2"
    if "run_pretraining.py" in words:
        words += SMALL.split()
    replaced = {"30522": "400", "256": "3", "0.001": "0.1"}
    return [replaced.get(word, word) for word in words]


def test_the_readme_begins_with_the_two_commands_and_shows_a_picture_that_is_there() -> None:
    assert commands()[:2] == ["bash scripts/quickstart.sh", "bash scripts/test.sh"]
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README):
        assert (ROOT / picture).is_file()


def test_the_commands_of_the_readme_run_in_order(tmp_path: Path) -> None:
    """From the dump to the comparison, in a folder that has the repository's code and nothing else."""
    for name in ("data_prep", "models", "pretrain", "tempo", "configs", "run_pretraining.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_dump(tmp_path / "enwiki-latest-pages-articles.xml.bz2")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    ran = 0
    for command in commands():
        if any(command.startswith(start) for start in NOT_HERE):
            continue
        if "bert_large_phase2" in command:
            # The README says to build data for phase 2 likewise.
            build = next(c for c in commands() if "data_prep build" in c).replace("128", "512")
            subprocess.run(adapted(build), cwd=tmp_path, env=environment, check=True, capture_output=True)
        if "pretrain.compare" in command:
            for new, old in (("baseline", "phase1"), ("tempo", "phase2")):
                shutil.copytree(tmp_path / "runs" / old, tmp_path / "runs" / new)
        done = subprocess.run(adapted(command), cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        ran += 1
    assert ran >= 7
    for run in ("phase1", "phase2"):
        last = json.loads((tmp_path / f"runs/{run}/metrics.jsonl").read_text().splitlines()[-1])
        assert last["step"] == 2
    assert (tmp_path / "compare.png").stat().st_size > 10_000


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture) -> None:
    layers, converted = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(layers, {})
    assert "total" in capsys.readouterr().out
    exec(converted, {})
    assert "BertSelfAttention (sdpa) -> tempo.attention" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_quickstart_trains_both_models_and_draws_them() -> None:
    """On real Wikipedia text; in a checkout where it ran before, it reuses what is there."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(
        ["bash", "scripts/quickstart.sh"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    losses = {}
    for layers in ("torch", "tempo"):
        rows = [json.loads(line) for line in (ROOT / f"runs/quickstart/{layers}/metrics.jsonl").read_text().splitlines()]
        losses[layers] = [row["loss"] for row in rows]
        tail = losses[layers][-10:]
        assert losses[layers][0] - sum(tail) / len(tail) > 2.0
        assert rows[-1]["eval_mlm_loss"] < 8.0
    assert max(abs(a - b) for a, b in zip(losses["torch"], losses["tempo"], strict=True)) < 0.2
    saved = {
        layers: json.loads((ROOT / f"runs/quickstart/{layers}/environment.json").read_text())["saved_bytes_per_token"]
        for layers in losses
    }
    assert saved["tempo"] < 0.7 * saved["torch"]
    assert (ROOT / "runs/quickstart/compare.png").stat().st_size > 10_000
    for text in ("final", "accuracy", "sequences", "saved bytes", "compare.png"):
        assert text in done.stdout
