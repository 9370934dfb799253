"""The host memory and the CPUs that a process may use: limits of control groups and of the process count, too."""

import contextlib
import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

SELF = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Return the least of the memory that the machine, the control groups and the address space have left."""
    # In a container the machine's figure is no limit at all: a pool of that size would be killed when it fills, hours
    # after the start.
    least = min([psutil.virtual_memory().available, *group_bytes(SELF, MOUNT)])
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return least if limit == resource.RLIM_INFINITY else min(least, limit - psutil.Process().memory_info().vms)


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * resource.getpagesize()


def group_bytes(own: Path, mount: Path) -> Iterator[int]:
    """Yield the bytes that each control group with a limit has left, of versions 1 and 2.

    Pages of files that were not used lately count as free: the kernel takes them back.

    Args:
        own: a file like /proc/self/cgroup.
        mount: the folder of all control groups.
    """
    for folder, is_v2 in _groups(own, mount, "memory"):
        v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        left = _left(folder, *(("memory.max", "memory.current", "inactive_file") if is_v2 else v1))
        if left is not None:
            yield left


def cpu_model() -> str:
    """Return the name of the CPU, or "unknown"."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def usable_cpus() -> int:
    """Return how many CPUs this process may keep busy: those of its affinity, or the least quota of its groups."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([own, *group_cpus(SELF, MOUNT)])


def usable_cores() -> int:
    """Return the same, but at most the physical cores: hyper-threads share the units of arithmetic."""
    return min(psutil.cpu_count(logical=False) or 1, usable_cpus())


def group_cpus(own: Path, mount: Path) -> Iterator[int]:
    """Yield the whole CPUs, at least 1, of the quota of each control group that has one; as ``group_bytes``.

    A thread more than the quota would stop all of them for the rest of each period.
    """
    for folder, is_v2 in _groups(own, mount, "cpu"):
        files = ("cpu.max",) if is_v2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # also "max": no quota
            quota, period = map(int, " ".join((folder / name).read_text() for name in files).split())
            if quota > 0:
                yield max(1, quota // period)


def _groups(own: Path, mount: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's groups and of those above, and whether they are of version 2."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            root = mount if number == "0" else mount / controller
            folder = root / path.lstrip("/")
            # In a container the path may be that of the host, which does not exist; its own group is then the root.
            yield from ((each, number == "0") for each in (folder, *folder.parents) if each.is_relative_to(root))


def _left(group: Path, limit_file: str, usage_file: str, reclaimable: str) -> int | None:
    """Return the bytes that one group has left, or None if it has no limit."""
    try:
        limit, used = (group / limit_file).read_text().strip(), int((group / usage_file).read_text())
        if limit == "max":
            return None
        rows = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(limit) - used + int(rows.get(reclaimable, 0))
    except (OSError, ValueError):
        return None
