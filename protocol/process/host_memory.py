"""The host memory that a process may still use: limits of control groups and of the process count, too."""

import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

SELF = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Return the least of the memory that the machine, the control groups and the address space have left."""
    least = min([psutil.virtual_memory().available, *group_bytes(SELF, MOUNT)])
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return least if limit == resource.RLIM_INFINITY else min(least, limit - psutil.Process().memory_info().vms)


def group_bytes(own: Path, mount: Path) -> Iterator[int]:
    """Yield the bytes that each control group with a limit has left, of versions 1 and 2.

    Pages of files that were not used lately count as free: the kernel takes them back.

    Args:
        own: a file like /proc/self/cgroup.
        mount: the folder of all control groups.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, files = mount, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, files = mount / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = root / path.lstrip("/")
        # In a container the path may be that of the host, which does not exist; its own group is then the root.
        for each in (folder, *folder.parents):
            if each.is_relative_to(root):
                left = _left(each, *files)
                if left is not None:
                    yield left


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
