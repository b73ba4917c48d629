"""`python -m data_prep inspect`: what is shown is what training sees."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from data_prep.__main__ import main
from data_prep.inspect import MaskedInstance, mask_instance, render
from data_prep.masking import MaskingRules
from data_prep.shards import list_shards, open_shard
from pretrain.dataset import PretrainingData
from tests.shard_factory import CLS, MASK, NVIDIA_SHARD, NVIDIA_VOCAB, SEP, words_of, write_directory

WORDS = words_of(200)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_directory(tmp_path / "data", {"train": [20, 21], "eval": [6]})


@pytest.mark.parametrize("whole_word", [False, True])
def test_masks_are_those_of_training(directory: Path, whole_word: bool) -> None:
    data = PretrainingData(directory, seed=11, whole_word_masking=whole_word)
    rules = MaskingRules.from_vocabulary(WORDS, whole_word=whole_word)
    shards = [open_shard(path) for path in list_shards(directory)]
    first_sample = 2 * data.num_instances
    batch = data.batch(first_sample, data.num_instances)
    epochs, numbers = data.instances_of(np.arange(first_sample, first_sample + data.num_instances))
    assert set(epochs.tolist()) == {2}
    for row, number in enumerate(numbers.tolist()):
        shown = mask_instance(shards, number, rules, seed=11, epoch=2)
        length = int(batch["attention_mask"][row].sum())
        used = batch["labels"][row] != -100
        assert shown.shown == batch["input_ids"][row, :length].tolist()
        assert shown.positions == batch["masked_positions"][row][used].tolist()
        assert [shown.original[place] for place in shown.positions] == batch["labels"][row][used].tolist()
        assert shown.is_random == bool(batch["next_sentence_label"][row])
        assert shown.segment_b_start == length - int(batch["token_type_ids"][row].sum())


def example() -> MaskedInstance:
    w0, w1, continuation = WORDS.index("w0"), WORDS.index("w1"), WORDS.index("##c0")
    original = [CLS, w0, continuation, w1, SEP, w0, w1, w1, SEP]
    shown = [CLS, w0, continuation, MASK, SEP, w0, w0, w1, SEP]
    return MaskedInstance(7, "train_00001.hdf5", 2, shown, original, [3, 5, 6], 5, True)


def test_an_instance_in_words() -> None:
    lines = render(example(), WORDS).plain.splitlines()
    assert lines[0] == "instance 7  (train_00001.hdf5, row 2)  9 tokens, 3 predicted"
    assert lines[1] == "next_sentence_label 1 = B is random, from another document"
    assert lines[2] == "  A  [CLS] w0c0 [MASK](w1) [SEP]"
    assert lines[3] == "  B  =w0= ~w0~(w1) w1 [SEP]"


def test_colours_tell_segments_and_kinds_of_mask_apart() -> None:
    output = io.StringIO()
    Console(file=output, force_terminal=True, color_system="standard", width=200).print(render(example(), WORDS))
    lines = output.getvalue().splitlines()
    assert "\x1b[36m" in lines[2]
    assert "\x1b[36m" not in lines[3].split("B")[1].split("(")[0]
    assert "\x1b[32m" in lines[3]
    assert len({style for line in lines for style in ("41m", "43m", "4;35m") if style in line}) == 3


def test_output_is_plain_when_piped(directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert main(["inspect", str(directory), "--num", "2", "--epoch", "3", "--seed", "4"]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert output.count("next_sentence_label") == 2
    assert "masks as drawn in epoch 3 with seed 4" in output
    for kind in ("[MASK](word)", "~other~(word)", "=word="):
        assert kind in output


def test_index_split_and_number_choose(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(directory), "--index", "19", "--num", "2"]) == 0
    output = capsys.readouterr().out
    assert "instance 19  (train_00000.hdf5, row 19)" in output
    assert "instance 20  (train_00001.hdf5, row 0)" in output
    assert main(["inspect", str(directory), "--split", "eval", "--num", "100"]) == 0
    assert capsys.readouterr().out.count("eval_00000.hdf5") == 6


def test_nvidias_masks_are_those_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(NVIDIA_SHARD), "--vocab", str(NVIDIA_VOCAB), "--index", "0", "--num", "1"]) == 0
    output = capsys.readouterr().out
    assert "128 tokens, 19 predicted" in output
    assert "recognize [MASK](the) 2011 census" in output
    assert "the masks are those of the file" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--index", "41"], "--index must lie between 0 and 40, got 41"),
        (["--index", "-1"], "--index must lie between"),
        (["--num", "0"], "--num must be at least 1, got 0"),
        (["--vocab", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_wrong_usage_ends_with_2(directory: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(directory), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_shards_without_a_vocabulary_ask_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.hdf5").write_bytes(NVIDIA_SHARD.read_bytes())
    assert main(["inspect", str(tmp_path)]) == 2
    assert "name the vocabulary with --vocab FILE" in capsys.readouterr().err
    small = tmp_path / "small.txt"
    small.write_text("\n".join(WORDS) + "\n")
    assert main(["inspect", str(tmp_path), "--vocab", str(small)]) == 2
    assert "the vocabulary has 200 entries" in capsys.readouterr().err
