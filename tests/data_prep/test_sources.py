from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_prep import sources
from data_prep.sources import Source, sentences_of, unwrapped


def read(spec: str, **options: str) -> tuple[list[list[str]], dict[str, int]]:
    source = Source(spec, **options)
    return [sentences_of(document, "en") for document in source.documents()], source.skipped


def test_text_is_one_sentence_a_line_and_a_blank_line_between_documents(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"three\r\n\r\n\r\n \r\nfour\r\nfive")  # Windows line ends, no final newline
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone. Still one.\ntwo\n")  # a byte-order mark
    documents, skipped = read(f"text:{tmp_path}/*.txt")
    assert documents == [["one. Still one.", "two"], ["three"], ["four", "five"]]
    assert skipped == {}


def test_files_are_documents_split_into_sentences(tmp_path: Path) -> None:
    folder = tmp_path / "deep"
    folder.mkdir()
    (folder / "a.txt").write_text("One sentence. Another one.\n\nA paragraph.")
    (folder / "empty.txt").write_text("")
    documents, _ = read(f"files:{tmp_path}/**/*.txt")
    assert documents == [["One sentence.", "Another one.", "A paragraph."], []]


def test_invalid_utf8_is_replaced_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good\nb\xffad\n")
    documents, skipped = read(f"text:{tmp_path}/a.txt")
    assert documents == [["good", "b\ufffdad"]]
    assert skipped == {"invalid_utf8_replaced": 1}


@pytest.fixture
def local_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = tmp_path / "corpus.jsonl"
    rows = [{"body": "First one. Second one.", "id": 1}, {"body": "", "id": 2}, {"body": "Third.", "id": 3}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_local_dataset_loads_through_datasets(local_dataset: Path) -> None:
    documents, _ = read(f"hf:{local_dataset}", text_column="body")
    assert documents == [["First one.", "Second one."], [], ["Third."]]


def test_a_directory_is_a_dataset_too(local_dataset: Path) -> None:
    folder = local_dataset.parent / "folder"
    folder.mkdir()
    local_dataset.rename(folder / "train.jsonl")
    documents, _ = read(f"hf:{folder}", text_column="body")
    assert len(documents) == 3


def test_a_missing_column_names_those_there_are(local_dataset: Path) -> None:
    with pytest.raises(ValueError, match=r"no column 'text' \(it has: body, id\).*--text-column"):
        read(f"hf:{local_dataset}")


def test_a_dataset_that_cannot_be_loaded_is_named(local_dataset: Path) -> None:
    with pytest.raises(ValueError, match="datasets library cannot load it"):
        read(f"hf:{local_dataset.parent}/nowhere_at_all/x")


def test_wikipedia_asks_datasets_for_the_named_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load_dataset(name: str, config: str, **options: object) -> datasets.IterableDataset:
        asked.append((name, config, options["split"], options["streaming"]))
        return datasets.Dataset.from_dict({"text": ["One. Two."], "title": ["T"]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    documents, _ = read("wikipedia:20231101.en")
    assert asked == [("wikimedia/wikipedia", "20231101.en", "train", True)]
    assert documents == [["One.", "Two."]]


@pytest.mark.parametrize("spec", ["nothing", "text:", "wiki:file", ":x"])
def test_an_unknown_kind_lists_the_kinds(spec: str) -> None:
    with pytest.raises(ValueError, match=r"wikipedia-dump:.*text:.*files:"):
        Source(spec)


@pytest.mark.parametrize("kind", ["text", "files", "wikipedia-dump"])
def test_a_path_that_matches_nothing_is_named(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"no file matches '{tmp_path}/none"):
        Source(f"{kind}:{tmp_path}/none*").files()


def test_windows_line_ends_a_byte_order_mark_and_a_missing_last_line_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfOne.\r\nTwo.\r\n\r\n\r\nThree.\r\nFour.")
    assert read(f"text:{tmp_path}/a.txt") == ([["One.", "Two."], ["Three.", "Four."]], {})
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfOne. Two.\r\n\r\nThree.")
    assert read(f"files:{tmp_path}/b.txt") == ([["One.", "Two.", "Three."]], {})


@pytest.mark.parametrize("kind", ["text", "files"])
@pytest.mark.parametrize("content", ["One.\nTwo.\n".encode("utf-16"), b"\x1f\x8b\x08\0\0\0\0\0"])
def test_a_file_that_is_not_text_is_refused(tmp_path: Path, kind: str, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text.*compressed, binary or UTF-16.*iconv"):
        read(f"{kind}:{tmp_path}/a.txt")


@pytest.mark.parametrize(("kind", "cure"), [("text", "put a blank line between documents"), ("files", "one document a file")])
@pytest.mark.parametrize("separator", ["\n", " "])
def test_a_document_that_would_fill_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, cure: str, separator: str
) -> None:
    monkeypatch.setattr(sources, "MAX_DOCUMENT_BYTES", 10_000)
    (tmp_path / "small.txt").write_text("A sentence.\n\n" * 2000 if kind == "text" else "A sentence.")
    assert len(read(f"{kind}:{tmp_path}/small.txt")[0]) == (2000 if kind == "text" else 1)
    (tmp_path / "large.txt").write_text(separator.join(["A sentence."] * 1000))
    with pytest.raises(ValueError, match=f"a document of .*large.txt has more than.*{cure}"):
        read(f"{kind}:{tmp_path}/large.txt")


WRAPPED = """CHAPTER ONE. The Storm

It was late in the evening when Mr.
Brown came home from the harbour. The wind had
risen since noon, and nobody expected the ship
before the morning. He lit the lamp.

"Has she come?" asked his wife. She had been
waiting at the window for hours, and the tea
was cold.
"""


def test_lines_broken_at_a_fixed_width_are_joined(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(WRAPPED.replace("\n", "\r\n"))
    (sentences,), _ = read(f"files:{tmp_path}/book.txt")
    assert "The wind had risen since noon, and nobody expected the ship before the morning." in sentences
    assert "She had been waiting at the window for hours, and the tea was cold." in sentences
    assert "He lit the lamp." in sentences


@pytest.mark.parametrize(
    "text",
    [
        "A first sentence.\nA second one.\nA third one! Yes.\n",
        "the cat sat on the mat\nand then it went home to sleep\nwhile dogs ran over the hills\n",
        "A heading\n" + "A paragraph that is one long line. " * 8 + "\nAnother heading\n" + "More of it. Much more. " * 9,
        "",
        "\n\n",
    ],
)
def test_other_text_keeps_its_lines(text: str) -> None:
    assert unwrapped(text) == text


def test_a_column_without_text_is_named(local_dataset: Path) -> None:
    with pytest.raises(ValueError, match="column 'id' holds int, not text: name another one with --text-column"):
        read(f"hf:{local_dataset}", text_column="id")


def test_the_files_of_a_local_dataset_are_its_input(local_dataset: Path) -> None:
    assert Source(f"hf:{local_dataset}").files() == [local_dataset]
    assert local_dataset in Source(f"hf:{local_dataset.parent}").files()
    assert Source("hf:some/dataset").files() == Source("wikipedia:20231101.en").files() == []


def test_a_stream_that_breaks_names_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    class Torn(Exception):
        pass

    class Stream(list):
        column_names = ("text",)

        def __iter__(self) -> Iterator[dict]:
            yield {"text": "One."}
            raise Torn("the line is dead")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: Stream())
    with pytest.raises(RuntimeError, match=r"'hf:x/y': reading stopped .Torn: the line is dead"):
        read("hf:x/y")
