"""How much memory is left, container limits included."""

import os
from pathlib import Path

import psutil


def available_memory() -> int:
    """Bytes that can be allocated without swapping."""
    inside_container = _container_available()
    everywhere = psutil.virtual_memory().available
    return everywhere if inside_container is None else min(everywhere, inside_container)


def check_memory(num_bytes: int, what: str, remedy: str) -> None:
    """ValueError when `num_bytes` do not fit into what is available, or not once per process of this machine.

    LOCAL_WORLD_SIZE (set by torchrun) counts the processes that will each need as much.
    """
    available = available_memory()
    if num_bytes > available:
        raise ValueError(f"{what} needs {num_bytes / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are available; {remedy}")
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
    total = psutil.virtual_memory().total
    if processes > 1 and num_bytes * processes > total:
        raise ValueError(
            f"{what} needs {num_bytes / 1e9:.1f} GB of memory in each of {processes} processes, the machine has "
            f"{total / 1e9:.1f} GB; {remedy}"
        )


def _container_available() -> int | None:
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((group / "memory.current").read_text())
        cached = 0
        for line in (group / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                cached = int(line.split()[1])  # page cache that the kernel gives back
        return max(0, int(limit) - used + cached)
    except (OSError, ValueError):
        return None
