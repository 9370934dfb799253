"""Reads parts of a GGUF file's tensors, from a memory map."""

import torch

from quire.kernels.common.block_weight import dequantise_blocks
from quire.protocol.model.checkpoint import StoredTensor
from quire.protocol.model.gguf_file import BLOCKS
from quire.worker_proc.models.weight_slot import WeightSlot

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_gguf_tensor(stored: StoredTensor, slot: WeightSlot) -> torch.Tensor:
    """Return the slot's part of a tensor: in whole rows of blocks, uint8, if the slot takes its type, else as floats.

    Rows of interleaved heads are put in order; a part has whole heads.
    """
    place = stored.gguf
    assert place is not None
    size = place.start + place.num_bytes
    mapped = torch.from_file(str(stored.file), shared=False, size=size, dtype=torch.uint8)
    elements, block_bytes = BLOCKS[place.kind]
    is_vector = len(place.shape) == 1
    row_bytes = (1 if is_vector else place.shape[-1] // elements) * block_bytes
    rows = mapped[place.start :].view(-1, row_bytes)
    if slot.part:
        rows = rows[slot.part[0]]
    if stored.interleaved:
        # numpy copies without torch's threads, which wait for each other beside other processes that start.
        pairs = rows.numpy().reshape(-1, stored.interleaved // 2, 2, row_bytes)
        rows = torch.from_numpy(pairs.swapaxes(1, 2).reshape(-1, row_bytes))
    if stored.dtype not in _PLAIN:
        return rows
    wide = rows.view(_PLAIN[place.kind]) if place.kind in _PLAIN else dequantise_blocks(place.kind, rows)
    if is_vector:
        return wide.view(-1)
    return wide if len(slot.part) < 2 else wide[:, slot.part[1]]
