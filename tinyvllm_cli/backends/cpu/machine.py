"""What this process may use of the machine: CPUs and memory, within the limits of a container."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def available_cpus() -> int:
    """CPUs this process may run on, and no more than its control group gives time for; at least 1."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read("cpu.max").split() or [
        *_read("cpu/cpu.cfs_quota_us").split(),
        *_read("cpu/cpu.cfs_period_us").split(),
    ]
    if len(quota) == 2 and quota[0].isdigit():  # version 2 says "max", version 1 says -1 where there is no limit
        cpus = min(cpus, -(-int(quota[0]) // int(quota[1])))
    return max(1, cpus)


def available_memory() -> int:
    """Bytes that can still be taken: what the system has, within the control group's limit where there is one."""
    free, limit = _system_memory(), _cgroup_memory()
    return free if limit is None else min(free, limit)


def _system_memory() -> int:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:  # no Linux: half of the memory there is, as nothing tells how much of it is free
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _cgroup_memory() -> int | None:
    """Limit minus use of the control group (version 2, else 1); pages of files count as free."""
    for folder, limit, used in (
        ("", "memory.max", "memory.current"),
        ("memory/", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        if (bytes_allowed := _read(folder + limit).strip()).isdigit():
            stat = dict(line.split() for line in _read(f"{folder}memory.stat").splitlines())
            return int(bytes_allowed) - int(_read(folder + used)) + int(stat.get("inactive_file", 0))
    return None


def _read(name: str) -> str:
    """A file of the control group; empty where there is none."""
    try:
        return (CGROUP / name).read_text()
    except OSError:
        return ""
