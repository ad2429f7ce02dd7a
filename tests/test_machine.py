"""CPUs and memory as the system, control groups and limits on the process give them."""

import os
import resource
from pathlib import Path

import pytest

from tinyvllm_cli.backends import machine
from tinyvllm_cli.said import format_bytes

GIB = 1 << 30
STAT = f"anon 1\nfile 9\ninactive_file {GIB // 2}\n"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write files of /sys/fs/cgroup; the system itself has 8 GiB free and 6 CPUs, the process no limits of its own."""
    monkeypatch.setattr(machine, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)

    def write(files: dict[str, str], group: str = "0::/\n") -> None:
        meminfo = f"MemTotal: 99 kB\nMemAvailable: {8 * GIB >> 10} kB\nHugePages_Total: 0\n"
        proc = {"proc/meminfo": meminfo, "proc/self/cgroup": group, "proc/self/statm": "1000 400 300 1 0 200 0\n"}
        for name, text in {**proc, **{f"cgroup/{name}": text for name, text in files.items()}}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return write


def v2(limit: int | str, used: int = 0, folder: str = "") -> dict[str, str]:
    files = {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": STAT}
    return {folder + name: text for name, text in files.items()}


def v1(limit: int, used: int = 0, folder: str = "") -> dict[str, str]:
    stat = STAT.replace("inactive_file", "total_inactive_file")
    files = {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used}\n", "memory.stat": stat}
    return {f"memory/{folder}{name}": text for name, text in files.items()}


V1 = "9:name=systemd:/\n4:memory:/a/b\n3:cpu,cpuacct:/a/b\n0::/\n"


@pytest.mark.parametrize(
    ("files", "group", "free"),
    [
        ({}, "0::/\n", 8 * GIB),
        ({}, "", 8 * GIB),
        (v2("max", 5), "0::/\n", 8 * GIB),
        (v2(3 * GIB, 2 * GIB), "0::/\n", 3 * GIB // 2),
        (v2(99 * GIB, GIB), "0::/\n", 8 * GIB),
        (v2(GIB, 9 * GIB), "0::/\n", 0),
        (v2(3 * GIB, GIB, "a/b/"), "0::/a/b\n", 5 * GIB // 2),
        (v2("max", 0, "a/b/") | v2(3 * GIB, GIB, "a/"), "0::/a/b\n", 5 * GIB // 2),
        (v2(2 * GIB, GIB, "a/b/") | v2(3 * GIB, GIB, "a/"), "0::/a/b\n", 3 * GIB // 2),
        (v2(3 * GIB, GIB, "a/b/") | v2(2 * GIB, GIB, "a/"), "0::/a/b\n", 3 * GIB // 2),
        (v2(3 * GIB, GIB), "0::/seen/from/outside\n", 5 * GIB // 2),
        (v2(GIB, 0, "b/"), "0::/a\n", 8 * GIB),
        (v1(3 * GIB, GIB), V1, 5 * GIB // 2),
        (v1(3 * GIB, GIB, "a/b/") | v1(2**63 - 4096), V1, 5 * GIB // 2),
        (v1(2**63 - 4096, GIB, "a/b/") | v1(3 * GIB, GIB, "a/"), V1, 5 * GIB // 2),
    ],
)
def test_memory_is_what_the_system_and_every_control_group_allow(files: dict[str, str], group: str, free: int, system):
    system(files, group)
    assert machine.available_memory() == free
    assert ("control group" if free < 8 * GIB else "machine") in machine.memory_bound()


@pytest.mark.parametrize(
    ("files", "group", "cpus"),
    [
        ({}, "0::/\n", 6),
        ({"cpu.max": "max 100000\n"}, "0::/\n", 6),
        ({"cpu.max": "200000 100000\n"}, "0::/\n", 2),
        ({"cpu.max": "150000 100000\n"}, "0::/\n", 2),
        ({"cpu.max": "10000 100000\n"}, "0::/\n", 1),
        ({"cpu.max": "900000 100000\n"}, "0::/\n", 6),
        ({"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, "0::/a/b\n", 3),
        ({"a/b/cpu.max": "200000 100000\n", "a/cpu.max": "300000 100000\n"}, "0::/a/b\n", 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, V1, 6),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, V1, 3),
        ({"cpu/a/b/cpu.cfs_quota_us": "300000\n", "cpu/a/b/cpu.cfs_period_us": "100000\n"}, V1, 3),
    ],
)
def test_cpus_are_what_the_system_and_every_control_group_allow(files: dict[str, str], group: str, cpus: int, system):
    system(files, group)
    assert machine.available_cpus() == cpus


@pytest.mark.parametrize(("limit", "pages"), [(resource.RLIMIT_AS, 1000), (resource.RLIMIT_DATA, 200)])
def test_memory_is_no_more_than_a_limit_on_the_process_leaves(limit: int, pages: int, system, monkeypatch):
    system({})
    limits = {limit: (GIB, GIB)}
    monkeypatch.setattr(resource, "getrlimit", lambda name: limits.get(name, (resource.RLIM_INFINITY,) * 2))
    reserve = machine.available_cpus() * machine.THREAD_RESERVE  # taken with the first products
    used = pages * resource.getpagesize()
    assert machine.available_memory() == GIB - used - reserve
    command = {resource.RLIMIT_AS: "-v", resource.RLIMIT_DATA: "-d"}[limit]
    assert machine.memory_bound() == (
        f"`ulimit {command}` allows {format_bytes(GIB)}, of which {format_bytes(used)} are in use and "
        f"{format_bytes(reserve)} are kept for its threads"
    )


def test_without_proc_half_of_the_memory_counts(system, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "PROC", Path("/nonexistent"))
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert machine.available_memory() == 500 * 4096
