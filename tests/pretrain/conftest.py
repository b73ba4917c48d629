from __future__ import annotations

from pathlib import Path

import pytest

from tests.shard_factory import write_directory


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """77 training and 20 held-out instances of up to 32 tokens, vocabulary of 200."""
    return write_directory(tmp_path_factory.mktemp("data") / "shards", {"train": [40, 37], "eval": [20]})
