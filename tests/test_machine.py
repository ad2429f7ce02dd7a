"""CPUs and memory as the system and a container's control group give them."""

import os
from pathlib import Path

import pytest

from tinyvllm_cli.backends.cpu import machine

GIB = 1 << 30
STAT = f"anon 1\nfile 9\ninactive_file {GIB // 2}\n"


@pytest.fixture
def control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write files of a control group; the system itself has 8 GiB free and 6 CPUs."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {8 * GIB >> 10} kB\nHugePages_Total: 0\n")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)

    return write


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 8 * GIB),
        ({"memory.max": "max\n", "memory.current": "5\n", "memory.stat": STAT}, 8 * GIB),
        ({"memory.max": f"{3 * GIB}\n", "memory.current": f"{2 * GIB}\n", "memory.stat": STAT}, 3 * GIB // 2),
        ({"memory.max": f"{99 * GIB}\n", "memory.current": f"{GIB}\n", "memory.stat": STAT}, 8 * GIB),
        (
            {
                "memory/memory.limit_in_bytes": f"{3 * GIB}\n",
                "memory/memory.usage_in_bytes": f"{GIB}\n",
                "memory/memory.stat": STAT,
            },
            5 * GIB // 2,
        ),
    ],
)
def test_memory_is_what_system_and_container_both_allow(files: dict[str, str], free: int, control_group):
    control_group(files)
    assert machine.available_memory() == free


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 6),
        ({"cpu.max": "max 100000\n"}, 6),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "900000 100000\n"}, 6),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 6),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
    ],
)
def test_cpus_are_what_system_and_container_both_allow(files: dict[str, str], cpus: int, control_group):
    control_group(files)
    assert machine.available_cpus() == cpus


def test_without_meminfo_half_of_the_memory_counts(control_group, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "MEMINFO", Path("/nonexistent"))
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert machine.available_memory() == 500 * 4096
