"""Choice of the transport between the ranks of a group, from the device and the machine."""

import os
import platform
from pathlib import Path

from quire.protocol.config import EngineConfig
from quire.worker_proc.parallel.group import SingleRank, TensorParallel


def join_group(config: EngineConfig, rank: int, path: Path) -> TensorParallel:
    """Connect to the other ranks.

    Args:
        path: prefix for files, unique per worker epoch, in a folder of mode 0700 that all ranks can access.
    """
    size = config.tensor_parallel_size
    if size == 1:
        return SingleRank()
    if config.device == "cpu" and platform.machine() in ("x86_64", "AMD64"):
        from quire.worker_proc.parallel.shared_memory import SharedMemoryGroup

        group = SharedMemoryGroup(path.with_suffix(".memory"), rank, size)
        group.barrier()
        return group
    from quire.worker_proc.parallel.distributed import DistributedGroup

    if config.device == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return DistributedGroup("gloo" if config.device == "cpu" else "nccl", path.with_suffix(".rendezvous"), rank, size)
