"""Small made-up vocabularies and shards for the tests of data_prep and pretrain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from data_prep.shards import FORMAT, Instances, ShardAttributes, vocab_hash, write_manifest, write_shard

SPECIALS = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNUSED, UNK, CLS, SEP, MASK = range(6)
DATA = Path(__file__).parent / "data"
NVIDIA_SHARD = DATA / "nvidia_seq128_512rows.hdf5"
NVIDIA_VOCAB = DATA / "vocab_bert_uncased_30522.txt"
LDDL_FILE = DATA / "lddl_static_300rows.parquet"


def words_of(size: int) -> list[str]:
    """Specials, then whole words, then a quarter of continuations."""
    num_words = size - len(SPECIALS)
    continuations = num_words // 4
    return [*SPECIALS, *(f"w{i}" for i in range(num_words - continuations)), *(f"##c{i}" for i in range(continuations))]


def random_instances(num: int, *, seed: int = 0, max_seq_length: int = 32, vocab_size: int = 200) -> Instances:
    """Instances of random ordinary words, lengths from 5 to max_seq_length."""
    rng = np.random.default_rng(seed)
    rows, starts = [], []
    for _ in range(num):
        length = int(rng.integers(5, max_seq_length + 1))
        cut = int(rng.integers(1, length - 3))
        text = rng.integers(len(SPECIALS), vocab_size, length - 3).tolist()
        rows.append([CLS, *text[:cut], SEP, *text[cut:], SEP])
        starts.append(cut + 2)
    return Instances.from_lists(rows, starts, rng.permutation(np.arange(num) % 2), dtype=np.uint32)


def write_directory(
    directory: Path, sizes: dict[str, list[int]], *, max_seq_length: int = 32, vocab_size: int = 200, **write_options: Any
) -> Path:
    """A complete data directory: shards of the given sizes per split, vocab.txt, manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab = directory / "vocab.txt"
    vocab.write_text("\n".join(words_of(vocab_size)) + "\n")
    digest = vocab_hash(vocab)
    attributes = ShardAttributes(max_seq_length, vocab_size, digest, {"lowercase": True}, {"seed": 1}, [{"source": "made up"}])
    splits: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
    for split, numbers in sizes.items():
        for k, num in enumerate(numbers):
            instances = random_instances(
                num, seed=k + 1000 * (split == "eval"), max_seq_length=max_seq_length, vocab_size=vocab_size
            )
            summary = write_shard(directory / f"{split}_{k:05d}.hdf5", instances, attributes, **write_options)
            splits[split].append(vars(summary))
    write_manifest(
        directory,
        {
            "format": FORMAT,
            "splits": splits,
            "max_seq_length": max_seq_length,
            "vocab": {"file": "vocab.txt", "size": vocab_size, "hash": digest},
            "tokenizer": {"lowercase": True},
            "sources": [{"source": "made up"}],
            "creation": {"seed": 1},
            "totals": {},
        },
    )
    return directory
