"""Progress bars on stderr."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def progress(items: Iterable[Item], what: str, unit: str, quiet: bool, total: int | None = None) -> Iterator[Item]:
    """Pass items on and show how far they are: on a terminal, or where TEMPO_PROGRESS=1 asks for it; never when quiet."""
    from tqdm import tqdm

    wanted = False if os.environ.get("TEMPO_PROGRESS") == "1" else None
    return iter(tqdm(items, desc=what, unit=unit, total=total, disable=True if quiet else wanted, dynamic_ncols=True))
