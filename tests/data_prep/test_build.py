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
    if how == "worker killed":
        os.kill(workers[0], signal.SIGKILL)
        _, error = process.communicate(timeout=60)
        assert process.returncode == 1
        assert re.search(r"a worker process died while (tokenising text:.*corpus|pairing sentences \(train\)).*SIGKILL", error)
        assert "Traceback" not in error
    else:
        time.sleep(0.3)  # into the work
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


def test_instances_are_counted_by_source(tmp_path: Path) -> None:
    second = write_corpus(tmp_path / "second.txt", num_documents=7, seed=5)
    code, output = build(tmp_path, "--source", f"text:{second}", "--eval-fraction", "0.2", "--duplicate-factor", "2")
    assert code == 0
    manifest = read_manifest(output)
    first, last = (source["instances"] for source in manifest["sources"])
    assert first > 4 * last > 0
    assert first + last == manifest["totals"]["instances"]


def test_input_that_changed_is_noticed_whatever_its_size(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt")
    build(tmp_path, corpus=corpus)
    corpus.write_text(corpus.read_text().replace("cat", "cow"))
    assert build(tmp_path, corpus=corpus)[0] == 2
    assert "of other input" in capsys.readouterr().err
    assert build(tmp_path, "--overwrite", corpus=corpus)[0] == 0


def test_a_lost_shard_is_not_taken_for_built(tmp_path: Path) -> None:
    _, output = build(tmp_path, "--num-shards", "2")
    before = digest(output)
    (output / "train_00001.hdf5").unlink()
    assert build(tmp_path, "--num-shards", "2")[0] == 2
    assert build(tmp_path, "--num-shards", "2", "--overwrite")[0] == 0
    assert digest(output) == before


def test_overwrite_replaces_a_damaged_manifest(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    _, output = build(tmp_path)
    before = digest(output)
    (output / "manifest.json").write_text("{")
    assert build(tmp_path)[0] == 2
    assert "manifest.json: not valid JSON" in capsys.readouterr().err
    assert build(tmp_path, "--overwrite")[0] == 0
    assert digest(output) == before


def test_overwrite_never_deletes_folders_or_the_input(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    home = tmp_path / "home"
    (home / "photos").mkdir(parents=True)
    assert build(tmp_path, "--overwrite", name="home")[0] == 2
    assert "folders in it (photos)" in capsys.readouterr().err
    corpora = tmp_path / "corpora"
    corpora.mkdir()
    corpus = write_corpus(corpora / "corpus.txt")
    assert build(tmp_path, "--overwrite", name="corpora", corpus=corpus)[0] == 2
    assert "has the input corpus.txt in it" in capsys.readouterr().err
    assert corpus.exists()
    assert only(tmp_path, "home", "corpora", "corpus.txt")


def test_a_link_to_the_output_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    assert build(tmp_path)[0] == 0
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "manifest.json").is_file()
    assert only(tmp_path, "out", "disk", "corpus.txt")


def test_an_output_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert build(tmp_path, name="file")[0] == 2
    assert "is a file; choose a directory" in capsys.readouterr().err
    assert build(tmp_path, name="file/out")[0] == 2
    assert "cannot be made: " in capsys.readouterr().err


def test_a_second_source_without_documents_stops_before_the_first_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    monkeypatch.setattr("data_prep.build._build", lambda *_: pytest.fail("the first source was read"))
    assert build(tmp_path, "--source", f"text:{tmp_path}/empty.txt")[0] == 2
    assert f"--source 'text:{tmp_path}/empty.txt' has no document with text" in capsys.readouterr().err


def test_more_than_65536_words_are_stored_wider(tmp_path: Path) -> None:
    vocabulary = tmp_path / "large.txt"
    words = [*VOCABULARY.read_text().split("\n")[:-1], *(f"extra{i}" for i in range(40_000))]
    vocabulary.write_text("\n".join(words) + "\n")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n\n".join("the cat extra39999 sat.\nit went home extra39999.\n" * 4 for _ in range(8)))
    code, output = build(tmp_path, "--vocab", str(vocabulary), corpus=corpus)
    assert code == 0
    shard = open_shard(output / "train_00000.hdf5")
    assert shard.tokens.dtype == np.uint32
    assert shard.tokens.max() == len(words) - 1
    assert main(["verify", str(output)]) == 0


def test_the_longest_instances_hold_whole_documents(tmp_path: Path) -> None:
    code, output = build(tmp_path, "--max-seq-length", "65535", "--short-seq-prob", "0")
    assert code == 0
    shard = open_shard(output / "train_00000.hdf5")
    assert shard.num_instances >= 60
    assert shard.lengths.max() > 64


def test_trained_special_tokens_lead_and_few_words_are_unknown(tmp_path: Path) -> None:
    _, output = build(tmp_path, "--train-vocab", "400")
    manifest = read_manifest(output)
    assert (output / "vocab.txt").read_text().split("\n")[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert manifest["sources"][0]["unknown_token_rate"] < 0.01
    assert manifest["vocab"]["size"] <= 400


def test_memory_does_not_grow_with_the_corpus_or_its_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tracemalloc

    # So that small corpora have many chunks too.
    monkeypatch.setattr("data_prep.shards._COPY_BYTES", 1 << 16)
    monkeypatch.setattr("data_prep.instance_building._INSTANCES_PER_CHUNK", 1000)
    monkeypatch.setattr("data_prep.instance_building._DOCUMENTS_PER_TASK", 100)

    def peak(num_documents: int, passes: int) -> int:
        corpus = write_corpus(tmp_path / f"{num_documents}.txt", num_documents)
        options = ("--duplicate-factor", str(passes), "--quiet")
        tracemalloc.start()
        try:
            assert build(tmp_path, *options, name=f"out{num_documents}", corpus=corpus)[0] == 0
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(250, 1)  # what is imported stays
    # Twelve times the instances; their tokens alone are 2 MB.
    assert peak(1000, 6) < 1.1 * peak(500, 1)


def test_quiet_is_quiet(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    assert build(tmp_path, "--quiet", "--train-vocab", "200")[0] == 0
    assert capfd.readouterr() == ("", "")


def test_a_dataset_is_built_by_several_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    rows = [{"body": "The cat sat on the mat. Then it went home to sleep. " * 5} for _ in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "data_prep", "build", "--source", f"hf:{tmp_path}/rows.jsonl", "--text-column", "body"]
    command += ["--vocab", str(VOCABULARY), "--workers", "2", "--output", str(tmp_path / "out")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120, capture_output=True)
    assert read_manifest(tmp_path / "out")["sources"][0]["sentences"] == 1000
