from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_prep.sources import Source, sentences_of


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
