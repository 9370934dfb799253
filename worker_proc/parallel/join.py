"""Choice of the transport between the ranks of a group, from the device and the machine."""

import os
import platform
from pathlib import Path
from socket import gethostname

import psutil

from quire.protocol.config import EngineConfig
from quire.protocol.errors import EngineError
from quire.protocol.nodes import WorkerLink
from quire.worker_proc.parallel.group import SingleRank, TensorParallel


def join_group(config: EngineConfig, rank: int, path: Path, link: WorkerLink | None = None) -> TensorParallel:
    """Connect to the other ranks.

    Args:
        path: prefix for files, unique per worker epoch, in a folder of mode 0700 that all ranks of a machine can
            access.
        link: for a worker on a node.

    Raises:
        EngineError: no network interface has the address of this machine.
    """
    size = config.tensor_parallel_size
    if size == 1:
        return SingleRank()
    if link is not None and link.rendezvous:
        return _join_over_network(config, rank, path.name, link)
    if config.device == "cpu" and platform.machine() in ("x86_64", "AMD64"):
        from quire.worker_proc.parallel.shared_memory import SharedMemoryGroup

        file = path.with_suffix(".memory")
        group = SharedMemoryGroup(file, rank, size)
        group.barrier()
        if rank == 0:
            file.unlink(missing_ok=True)  # all ranks have opened it
        return group
    from quire.worker_proc.parallel.distributed import DistributedGroup, file_store

    if config.device == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = file_store(path.with_suffix(".rendezvous"), size)
    return DistributedGroup("gloo" if config.device == "cpu" else "nccl", store, rank, size)


def _join_over_network(config: EngineConfig, rank: int, name: str, link: WorkerLink) -> TensorParallel:
    """Connect to ranks on other machines. ``name``: one that no earlier group of this engine had."""
    from quire.worker_proc.parallel.distributed import DistributedGroup, network_store

    interface = _interface_of(link.own_address)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    address, _, port = link.rendezvous.removeprefix("tcp://").rpartition(":")
    store = network_store(address, int(port), name, is_owner=rank == 0)
    return DistributedGroup("gloo" if config.device == "cpu" else "nccl", store, rank, config.tensor_parallel_size)


def _interface_of(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    raise EngineError(f"no network interface of {gethostname()} has the address {address} of `quire node`")
