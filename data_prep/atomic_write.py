"""Files that appear complete or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is synced to disk and renamed, on an error removed.

    The temporary name follows from the final one (`.NAME.tmp`), so that what a killed process left behind is
    overwritten by the next attempt instead of piling up. Two processes must not write one `path` at a time.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def write_bytes_atomically(path: str | Path, data: bytes) -> None:
    """Write `data` to `path`; a reader sees the old file or the new one, never a part."""
    with written_whole(path) as temporary:
        temporary.write_bytes(data)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some network file systems cannot sync a directory; the file itself must be synced
            raise
    finally:
        os.close(descriptor)
