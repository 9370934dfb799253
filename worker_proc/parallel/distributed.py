"""Communication with ``torch.distributed``: NCCL between GPUs, gloo between CPUs."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

JOIN_S = 60.0
"""Time limit for all ranks to reach the store of rank 0."""


def file_store(path: Path, size: int) -> Store:
    """Return the store of ranks on one machine. ``path``: a new file in a folder that all ranks can access."""
    return FileStore(str(path), size)


def network_store(address: str, port: int, name: str, *, is_owner: bool) -> Store:
    """Return the store of ranks on several machines, which the owner serves at ``port`` of its ``address``.

    Args:
        name: one per group, so that a rank of an earlier group finds nothing.
    """
    store = TCPStore(address, port, is_master=is_owner, wait_for_workers=False, timeout=timedelta(seconds=JOIN_S))
    return PrefixStore(name, store)


class DistributedGroup:
    """``TensorParallel`` over the process's ``torch.distributed`` group, which it creates and owns.

    Args:
        store: where the ranks find each other's addresses; no other group has used it.
    """

    def __init__(self, backend: str, store: Store, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._store = store  # that of rank 0 serves the others
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape
        gathered = x.new_empty(self.size, rows, width)
        dist.all_gather(list(gathered.unbind(0)), x.contiguous())
        return gathered.transpose(0, 1).reshape(rows, self.size * width)

    def close(self) -> None:
        dist.destroy_process_group()
