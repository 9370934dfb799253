"""The host memory that is free, with limits of control groups and of the address space."""

import resource
from pathlib import Path

import pytest

from quire.protocol.process import host_memory
from quire.protocol.process.host_memory import available_bytes, group_bytes


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
    monkeypatch.setattr(host_memory, "SELF", own)
    monkeypatch.setattr(host_memory, "MOUNT", tmp_path)
    assert available_bytes() == 600
    own.write_text("")
    used = host_memory.psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (used + 10**6, used + 10**6))
    assert available_bytes() < 10**7
