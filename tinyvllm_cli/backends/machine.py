"""What this process may use of the machine: CPUs and memory, within the limits of control groups and of `ulimit`."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from tinyvllm_cli.said import format_bytes

CGROUP = Path("/sys/fs/cgroup")
PROC = Path("/proc")

# Limits on this process: what sets each, and which number of /proc/self/statm counts against it (proc(5); in pages).
ADDRESS_SPACES = (("ulimit -v", resource.RLIMIT_AS, 0), ("ulimit -d", resource.RLIMIT_DATA, 5))
THREAD_RESERVE = 1 << 27  # bytes of address space: an arena of malloc and a buffer of BLAS


def available_cpus() -> int:
    """CPUs this process may run on, and no more than its control groups give time for; at least 1."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _control_groups("cpu"):
        quota = _read(group / "cpu.max").split() or [
            *_read(group / "cpu.cfs_quota_us").split(),
            *_read(group / "cpu.cfs_period_us").split(),
        ]
        if len(quota) == 2 and quota[0].isdigit():  # version 2 says "max", version 1 says -1 where there is no limit
            cpus = min(cpus, -(-int(quota[0]) // int(quota[1])))
    return max(1, cpus)


def available_memory() -> int:
    """Bytes that can still be taken: the least that the system, a control group or a limit on the process leaves."""
    return max(0, min(_memory_bounds())[0])


def memory_bound() -> str:
    """What it is that leaves no more than available_memory(), as a sentence without its end."""
    return min(_memory_bounds())[1]


def _memory_bounds() -> Iterator[tuple[int, str]]:
    yield _system_memory(), "the machine has no more"
    yield from ((left, "its container or control group allows no more") for left in _cgroup_memory())
    yield from _process_memory()


def _system_memory() -> int:
    fields = dict(line.split(":", 1) for line in _read(PROC / "meminfo").splitlines() if ":" in line)
    if "MemAvailable" not in fields:  # no Linux: half of the memory there is, as nothing tells how much of it is free
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return int(fields["MemAvailable"].split()[0]) * 1024


def _cgroup_memory() -> Iterator[int]:
    """Limit minus use of each control group (version 2, else 1); pages of files count as free."""
    for group in _control_groups("memory"):
        for limit, used, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            if (bytes_allowed := _read(group / limit).strip()).isdigit():
                stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
                yield int(bytes_allowed) - int(_read(group / used)) + int(stat.get(cached, 0))


def _process_memory() -> Iterator[tuple[int, str]]:
    """Limit minus use of the address space and of private memory, where they are set, and how that comes.

    Less what the threads will take with their first products: OpenBLAS ends the process where it cannot have that.
    """
    pages = _read(PROC / "self/statm").split()
    for command, limit, column in ADDRESS_SPACES:
        bytes_allowed = resource.getrlimit(limit)[0]
        if bytes_allowed != resource.RLIM_INFINITY:
            used = int(pages[column]) * resource.getpagesize() if pages else 0
            reserve = available_cpus() * THREAD_RESERVE
            shares = f"{format_bytes(used)} are in use and {format_bytes(reserve)} are kept for its threads"
            yield bytes_allowed - used - reserve, f"`{command}` allows {format_bytes(bytes_allowed)}, of which {shares}"


def _control_groups(controller: str) -> Iterator[Path]:
    """The folders of the control group that this process is in and of those around it: a limit of any of them holds.

    A container may see the path that its group has outside of it: then only the root is there, which is its own group.
    """
    for line in _read(PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUP / controller if controllers else CGROUP  # version 1 has a folder for each controller
        group = root / path.lstrip("/")
        yield group
        yield from (parent for parent in group.parents if parent.is_relative_to(root))


def _read(path: Path) -> str:
    """A file of the system; empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""
