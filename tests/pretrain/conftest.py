from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.shard_factory import write_directory


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """77 training and 20 held-out instances of up to 32 tokens, vocabulary of 200."""
    return write_directory(tmp_path_factory.mktemp("data") / "shards", {"train": [40, 37], "eval": [20]})


@pytest.fixture(autouse=True)
def _leave_the_process_as_it_was() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
