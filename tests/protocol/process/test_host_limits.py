"""The host memory that is free, and the usable CPUs: with limits of control groups and of the address space."""

import os
import resource
from pathlib import Path

import pytest

from quire.protocol.process import host_limits
from quire.protocol.process.host_limits import available_bytes, group_bytes, usable_cores, usable_cpus


def group(folder: Path, limit: str, used: int, inactive: int, *, version: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    row = "inactive_file" if version == 2 else "total_inactive_file"
    (folder / "memory.stat").write_text(f"anon 7\n{row} {inactive}\n")


def left(tmp_path: Path, lines: str) -> list[int]:
    own = tmp_path / "own"
    own.write_text(lines)
    return sorted(group_bytes(own, tmp_path))


def test_version_2_with_a_limit_on_a_group_above(tmp_path: Path) -> None:
    group(tmp_path / "pod", "1000", 400, 100, version=2)
    group(tmp_path / "pod/box", "max", 300, 0, version=2)
    assert left(tmp_path, "0::/pod/box\n") == [700]


def test_version_1(tmp_path: Path) -> None:
    group(tmp_path / "memory/box", "900", 100, 0, version=1)
    group(tmp_path / "memory", "9223372036854771712", 0, 0, version=1)
    assert left(tmp_path, "5:cpu:/box\n4:memory:/box\n0::/\n")[0] == 800


def test_a_container_sees_only_its_own_group(tmp_path: Path) -> None:
    group(tmp_path, "500", 200, 0, version=2)
    assert left(tmp_path, "0::/host/path/of/the/box\n") == [300]


def test_no_groups(tmp_path: Path) -> None:
    assert left(tmp_path, "") == [] == list(group_bytes(tmp_path / "nothing", tmp_path))
    group(tmp_path / "bad", "many", 1, 1, version=2)
    assert left(tmp_path, "0::/bad\n") == []


def test_the_least_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group(tmp_path, "1000", 400, 0, version=2)
    own = tmp_path / "own"
    own.write_text("0::/\n")
    monkeypatch.setattr(host_limits, "SELF", own)
    monkeypatch.setattr(host_limits, "MOUNT", tmp_path)
    assert available_bytes() == 600
    own.write_text("")
    used = host_limits.psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (used + 10**6, used + 10**6))
    assert available_bytes() < 10**7


@pytest.mark.parametrize(
    ("lines", "files", "cpus"),
    [
        ("", {}, 16),
        ("0::/", {"cpu.max": "max 100000"}, 16),
        ("0::/", {"cpu.max": "250000 100000"}, 2),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/pod/box", {"pod/cpu.max": "300000 100000", "pod/box/cpu.max": "900000 100000"}, 3),
        ("0::/path/of/the/host", {"cpu.max": "400000 100000"}, 4),
        ("0::/", {"cpu.max": "9900000 100000"}, 16),
        ("0::/", {"cpu.max": "many"}, 16),
        ("3:cpu,cpuacct:/box\n0::/", {"cpu/box/cpu.cfs_quota_us": "-1", "cpu/box/cpu.cfs_period_us": "100000"}, 16),
        ("3:cpuset:/\n2:cpu:/box", {"cpu/cpu.cfs_quota_us": "500000", "cpu/cpu.cfs_period_us": "100000"}, 5),
    ],
)
def test_quotas_bound_the_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, files: dict[str, str], cpus: int
) -> None:
    for name, text in {"own": lines, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(host_limits, "SELF", tmp_path / "own")
    monkeypatch.setattr(host_limits, "MOUNT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(16))
    monkeypatch.setattr(host_limits.psutil, "cpu_count", lambda logical: 4)
    assert (usable_cpus(), usable_cores()) == (cpus, min(cpus, 4))
