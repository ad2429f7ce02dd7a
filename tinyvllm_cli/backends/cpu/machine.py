"""What this process may use of the machine: CPUs and memory."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def available_cpus() -> int:
    """CPUs this process may run on, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory() -> int:
    """Bytes that can still be taken: what the system has, within the control group's limit where there is one."""
    free = _meminfo_available()
    limit = _cgroup_available()
    return free if limit is None else min(free, limit)


def _meminfo_available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # no Linux: half of the memory there is, as nothing tells how much of it is free
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _cgroup_available() -> int | None:
    """Limit minus use of a container's control group (version 2, else 1); pages of files count as free."""
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = int((CGROUP / limit_name).read_text()), int((CGROUP / used_name).read_text())
            stat = (CGROUP / limit_name).with_name("memory.stat").read_text()
        except (OSError, ValueError):  # no such file, or "max"
            continue
        fields = dict(line.split() for line in stat.splitlines())
        return limit - used + int(fields.get("inactive_file", 0))
    return None
