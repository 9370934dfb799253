"""Communication with ``torch.distributed``: NCCL between GPUs, gloo between CPUs."""

from pathlib import Path

import torch
import torch.distributed as dist


class DistributedGroup:
    """``TensorParallel`` over the process's ``torch.distributed`` group, which it creates and owns.

    Args:
        rendezvous: a file that no group has used before, in a folder that all ranks can access.
    """

    def __init__(self, backend: str, rendezvous: Path, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=size)

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
