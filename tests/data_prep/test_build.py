from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data_prep.__main__ import main
from data_prep.shards import list_shards, open_shard, read_manifest

ROOT = Path(__file__).parents[2]
VOCABULARY = ROOT / "tests/data/vocab_bert_uncased_30522.txt"
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "then",
    "went",
    "home",
    "to",
    "sleep",
    "while",
    "dogs",
    "ran",
    "over",
    "green",
    "hills",
    "in",
    "early",
    "spring",
]


def write_corpus(path: Path, num_documents: int = 60, sentences: int = 12, seed: int = 0) -> Path:
    chooser = random.Random(seed)
    documents = [
        "\n".join(" ".join(chooser.choices(WORDS, k=chooser.randint(3, 14))) + "." for _ in range(sentences))
        for _ in range(num_documents)
    ]
    path.write_text("\n\n".join(documents) + "\n")
    return path


def build(tmp_path: Path, *options: str, name: str = "out", corpus: Path | None = None) -> tuple[int, Path]:
    corpus = corpus or write_corpus(tmp_path / "corpus.txt")
    output = tmp_path / name
    arguments = ["build", "--source", f"text:{corpus}", "--output", str(output), "--max-seq-length", "64", *options]
    if not any(option.endswith("vocab") for option in options):
        arguments += ["--vocab", str(VOCABULARY)]
    if "--workers" not in options:
        arguments += ["--workers", "1"]
    return main(arguments), output


def digest(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()


def only(folder: Path, *names: str) -> bool:
    """Whether a folder holds nothing but these entries: nothing half-written was left behind."""
    return {path.name for path in folder.iterdir()} == set(names)


def test_the_result_is_complete_and_says_what_is_in_it(tmp_path: Path) -> None:
    code, output = build(tmp_path, "--num-shards", "3", "--eval-fraction", "0.2")
    assert code == 0
    manifest = read_manifest(output)
    assert only(
        output, "train_00000.hdf5", "train_00001.hdf5", "train_00002.hdf5", "eval_00000.hdf5", "manifest.json", "vocab.txt"
    )
    (source,) = manifest["sources"]
    assert (source["documents"], source["sentences"], source["skipped"]) == (60, 720, {})
    assert source["unknown_token_rate"] == 0
    assert (output / "vocab.txt").read_bytes() == VOCABULARY.read_bytes()
    counts = [shard["num_instances"] for shard in manifest["splits"]["train"]]
    assert max(counts) - min(counts) <= 1
    for split in ("train", "eval"):
        for path, listed in zip(list_shards(output, split), manifest["splits"][split], strict=True):
            shard = open_shard(path)
            assert (shard.num_instances, shard.content_hash) == (listed["num_instances"], listed["content_hash"])
            assert shard.attributes.tokenizer["lowercase"] is True
            assert shard.attributes.vocab_hash == hashlib.sha256(VOCABULARY.read_bytes()).hexdigest()
    assert main(["verify", str(output)]) == 0


def test_any_number_of_workers_gives_the_same_bytes(tmp_path: Path) -> None:
    options = ("--train-vocab", "300", "--num-shards", "4", "--eval-fraction", "0.1", "--duplicate-factor", "2")
    digests = {digest(build(tmp_path, *options, "--workers", str(n), name=f"out{n}")[1]) for n in (1, 2, 3)}
    assert len(digests) == 1


def test_another_seed_gives_other_pairs(tmp_path: Path) -> None:
    assert digest(build(tmp_path, name="a")[1]) != digest(build(tmp_path, "--seed", "7", name="b")[1])


def test_held_out_documents_are_in_no_training_instance(tmp_path: Path) -> None:
    corpus = tmp_path / "numbered.txt"
    corpus.write_text("\n\n".join("\n".join(f"{d} {d} {d} {d}" for _ in range(6)) for d in range(1000, 1050)))
    _, output = build(tmp_path, "--eval-fraction", "0.3", corpus=corpus)
    sets = [
        set(np.concatenate([open_shard(p).tokens for p in list_shards(output, split)]).tolist()) - {101, 102}
        for split in ("train", "eval")
    ]
    tokenised = [{int(i) for i in s} for s in sets]
    assert tokenised[0]
    assert tokenised[1]
    # Every document is one word repeated; numbers that tokenise to several pieces may share pieces.
    words = VOCABULARY.read_text().split("\n")
    whole = [{words[i] for i in s if words[i].isdigit() and len(words[i]) == 4} for s in tokenised]
    assert whole[0] & whole[1] == set()


def test_built_again_there_is_nothing_to_do(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    _, output = build(tmp_path)
    stamp = (output / "manifest.json").stat().st_mtime_ns
    code, _ = build(tmp_path, "--workers", "2")
    assert code == 0
    assert "nothing to do" in capsys.readouterr().out
    assert (output / "manifest.json").stat().st_mtime_ns == stamp


def test_other_content_is_not_overwritten_unless_asked(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    _, output = build(tmp_path)
    before = digest(output)
    assert build(tmp_path, "--seed", "9")[0] == 2
    assert "--overwrite" in capsys.readouterr().err
    assert digest(output) == before
    assert build(tmp_path, "--seed", "9", "--overwrite")[0] == 0
    assert digest(output) != before
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    assert build(tmp_path, name="mine")[0] == 2
    assert (other / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", (), "has no document with text"),
        ("\n \n\x0b\n", (), "has no document with text"),
        ("one sentence here.\nand another one.\n", (), "single document.*blank line"),
        ("a b c.\n\n" * 30, (), "blank line after every sentence"),
        ("中 文.\nword.\n\n" * 30, ("--max-unknown-rate", "0.0"), r"are \[UNK\].*--train-vocab"),
        ("a b c.\nd e f.\n\n" * 3, ("--num-shards", "500"), "only .* instances: lower --num-shards"),
        ("a b c.\nd e f.\n\n" * 4, ("--eval-fraction", "0.01"), "--eval-fraction 0.01 leaves 0 of 4 documents"),
        ((("word " * 100 + "\n") * 2 + "\n") * 300, (), "of the train split's next sentences are random"),
    ],
)
def test_a_corpus_that_cannot_serve_is_refused_with_the_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture, content: str, options: tuple[str, ...], message: str
) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(content)
    vocabulary = VOCABULARY
    if "UNK" in message:
        vocabulary = tmp_path / "tiny.txt"
        vocabulary.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nword\n.\n")
    code, _ = build(tmp_path, "--vocab", str(vocabulary), *options, corpus=corpus)
    assert code == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-seq-length", "4"), "--max-seq-length must lie between 8 and 65535"),
        (("--workers", "0"), "--workers must lie between"),
        (("--eval-fraction", "1.5"), "--eval-fraction must lie in"),
        (("--short-seq-prob", "2"), "--short-seq-prob must lie between"),
        (("--train-vocab", "5"), "--train-vocab must be at least 100"),
        (("--source", "text:nowhere/*.txt"), "no file matches 'nowhere"),
        (("--source", "tekst:x"), "must be one of"),
        (("--vocab", "no_such_vocab.txt"), "cannot read the vocabulary"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, capsys: pytest.CaptureFixture, options: tuple[str, ...], message: str) -> None:
    code, output = build(tmp_path, *options)
    assert code == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_more_than_one_source_is_counted_apart(tmp_path: Path) -> None:
    second = tmp_path / "books"
    second.mkdir()
    for i in range(5):
        (second / f"{i}.txt").write_text("A sentence of a book. Another sentence follows. " * 5)
    code, output = build(tmp_path, "--source", f"files:{second}/*.txt")
    assert code == 0
    assert [source["documents"] for source in read_manifest(output)["sources"]] == [60, 5]


def test_the_same_source_twice_is_read_twice(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt")
    code, output = build(tmp_path, "--source", f"text:{corpus}", "--train-vocab", "300", corpus=corpus)
    assert code == 0
    assert [source["documents"] for source in read_manifest(output)["sources"]] == [60, 60]


def test_a_page_that_breaks_the_parser_is_counted_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mwparserfromhell

    parse = mwparserfromhell.parse

    def fragile(text: str, **options: object) -> object:
        if "poison" in text:
            raise RecursionError("too deep")
        return parse(text, **options)

    monkeypatch.setattr(mwparserfromhell, "parse", fragile)
    sentences = " ".join("The cat sat on the mat and slept." for _ in range(8))
    pages = "".join(
        f"<page><title>P{i}</title><ns>0</ns><revision><text>{'poison ' if i == 3 else ''}{sentences}</text></revision></page>"
        for i in range(12)
    )
    (tmp_path / "dump.xml").write_text(f"<mediawiki>{pages}</mediawiki>")
    output = tmp_path / "out"
    source = ["--source", f"wikipedia-dump:{tmp_path}/dump.xml", "--vocab", str(VOCABULARY), "--output", str(output)]
    assert main(["build", *source, "--workers", "1"]) == 0
    (counts,) = read_manifest(output)["sources"]
    assert (counts["documents"], counts["skipped"]) == (11, {"unparsable": 1})


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def workers_of(pid: int) -> list[int]:
    """Worker processes are the children of the command's fork server."""
    return [worker for child in children(pid) for worker in children(child)]


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or dead and waiting for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("how", ["worker killed", "SIGINT", "SIGTERM", "SIGKILL"])
def test_a_killed_process_leaves_nothing_half_written(tmp_path: Path, how: str) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt", num_documents=4000, sentences=40)
    output = tmp_path / "out"
    command = [sys.executable, "-m", "data_prep", "build", "--source", f"text:{corpus}", "--vocab", str(VOCABULARY)]
    command += ["--output", str(output), "--workers", "2", "--duplicate-factor", "20"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(workers := workers_of(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    if how == "worker killed":
        os.kill(workers[0], signal.SIGKILL)
        _, error = process.communicate(timeout=60)
        assert process.returncode == 1
        assert re.search(r"a worker process died while (tokenising text:.*corpus|pairing sentences \(train\)).*SIGKILL", error)
        assert "Traceback" not in error
    else:
        process.send_signal(getattr(signal, how))
        _, error = process.communicate(timeout=60)
        assert process.returncode == (-signal.SIGKILL if how == "SIGKILL" else 130)
        assert "Traceback" not in error
    if how != "SIGKILL":  # nobody is left then to tidy up
        assert only(tmp_path, "corpus.txt")
    assert not output.exists()
    while not all(map(has_ended, workers)) and time.monotonic() < deadline + 30:
        time.sleep(0.02)
    assert all(map(has_ended, workers)), "workers outlive their command"


def test_the_manifest_tells_what_the_input_was(tmp_path: Path) -> None:
    _, output = build(tmp_path)
    manifest = json.loads((output / "manifest.json").read_text())
    given = manifest["creation"]["input"]
    assert (given["files"], given["bytes"]) == (1, (tmp_path / "corpus.txt").stat().st_size)
    assert len(given["sha256"]) == 64
    assert set(manifest["creation"]["versions"]) == {"tokenizers", "sentencex", "mwparserfromhell"}


def test_help_shows_an_example_per_source() -> None:
    command = [sys.executable, "-m", "data_prep", "build", "--help"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for source in ("wikipedia-dump:", "wikipedia:2", "hf:", "text:", "files:"):
        assert source in text
