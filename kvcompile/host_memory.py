"""Memory of this machine that a new process can have: what the kernel calls available, within a container's limit."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class HostMemory(NamedTuple):
    """In bytes."""

    total: int
    available: int


def read(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """Raises OSError where the kernel does not say."""
    lines = (proc / "meminfo").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    total, available = kib["MemTotal"] << 10, kib["MemAvailable"] << 10
    limit, used = (_number(cgroup / name) for name in ("memory.max", "memory.current"))
    if limit is None or limit >= total:
        return HostMemory(total, available)
    # Files that were read count as used until somebody needs their memory.
    used = (used or 0) - _inactive_files(cgroup / "memory.stat")
    return HostMemory(limit, min(available, max(limit - used, 0)))


def _number(path: Path) -> int | None:
    """A cgroup file's number; None if there is no such file or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _inactive_files(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
