"""The progress bar of long work: on a terminal, or where TEMPO_PROGRESS=1 asks for it (the quickstart does)."""

from __future__ import annotations

import os

from tqdm import tqdm


def progress_bar(what: str, start: int, total: int, visible: bool = True) -> tqdm:
    """Return a tqdm bar from `start` to `total` steps; elsewhere than on a terminal it stays silent."""
    wanted = False if os.environ.get("TEMPO_PROGRESS") == "1" else None
    return tqdm(desc=what, initial=start, total=total, unit="step", disable=wanted if visible else True, dynamic_ncols=True)
