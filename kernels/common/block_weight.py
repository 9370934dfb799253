"""A weight matrix in the blocks of a GGUF file: the memory form of types that ``ScaledWeight`` cannot hold exactly.

Such types have a minimum for each group, or scales of six bits that a larger block scales again: as plain scales they
would take up to a third more memory than the file, or be rounded. A block has consecutive inputs of one output:

* Q4_1, Q5_0, Q5_1: 32 inputs with a float16 scale, and a float16 minimum in the types ending with 1. Four bits of each
  code lie in 16 bytes: the first 16 codes in the low halves. The fifth bits are a 32-bit word.
* Q4_K, Q5_K: 256 inputs in 8 groups. A group's scale and minimum are six-bit integers, times two float16 numbers.
* Q6_K: 256 inputs in 16 groups, whose scales are signed bytes times a float16 number. Codes are 0 to 63, less 32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.kernels.common.scaled_weight import INT4_ZERO


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """``[outputs, inputs]`` in whole blocks.

    Attributes:
        kind: name of the type in ``BLOCK_TYPES``.
        blocks: uint8 ``[outputs, bytes]``.
        inputs: the inputs, as a part of those in the blocks.
    """

    kind: str
    blocks: torch.Tensor
    inputs: slice

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.blocks), self.inputs.stop - self.inputs.start

    def dequantise(self, rows: slice = slice(None)) -> torch.Tensor:
        """Return some rows of the weight, float32 ``[rows, inputs]``."""
        return dequantise_blocks(self.kind, self.blocks[rows])[:, self.inputs]


def dequantise_blocks(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """Widen the blocks of a type: uint8 ``[rows, bytes]`` → float32 ``[rows, inputs]``."""
    size, widen, _ = BLOCK_TYPES[kind]
    return widen(blocks.reshape(-1, size)).reshape(len(blocks), -1)


def block_scales(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """Return the float16 numbers of the blocks: uint8 ``[rows, bytes]`` → ``[blocks, numbers]``."""
    size, _, places = BLOCK_TYPES[kind]
    each = blocks.reshape(-1, size)
    return torch.cat([each[:, at : at + 2].contiguous().view(torch.float16) for at in places], 1)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return a float16 number of each block, float32 ``[blocks, 1]``."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def nibbles(octets: torch.Tensor) -> torch.Tensor:
    """Return the low halves of the bytes, then the high ones: ``[..., n]`` → ``[..., 2n]``."""
    return torch.cat([octets & 15, octets >> 4], -1)


def _fifth_bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return bits 4 of 32 codes, uint8 ``[blocks, 32]``, from a word with the first code's bit lowest."""
    octets = blocks[:, at : at + 4]
    return (torch.stack([octets >> bit for bit in range(8)], -1).flatten(1) & 1) << 4


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (nibbles(blocks[:, 2:]).float() - INT4_ZERO)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * ((nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)) + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8)


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack 8 scales and 8 minima from 12 bytes: float32 ``[blocks, 8]`` each.

    The first four of each are the low six bits of bytes 0 to 3 and 4 to 7. The others have their low four bits in bytes
    8 to 11, scales in the low halves, and their high two bits in the highest bits of the first eight bytes.
    """
    first, second, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([first & 63, (rest & 15) | (first >> 6 << 4)], 1)
    minima = torch.cat([second & 63, (rest >> 4) | (second >> 6 << 4)], 1)
    return scales.float(), minima.float()


def _grouped(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Scale codes ``[blocks, 8, 32]`` of Q4_K or Q5_K."""
    scales, minima = _six_bits(blocks[:, 4:16])
    scaled = (_half(blocks, 0) * scales)[..., None] * codes
    return scaled.sub_((_half(blocks, 2) * minima)[..., None])


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _grouped(blocks, nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    low = nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
    high = torch.stack([blocks[:, 16:48] >> bit for bit in range(8)], 1) & 1
    return _grouped(blocks, low | (high << 4))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    high = torch.stack([blocks[:, 128:192].view(-1, 2, 32) >> shift for shift in (0, 2, 4, 6)], 2) & 3
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    return scales[..., None] * ((low | (high << 4)).float() - 32).view(-1, 16, 16)


BLOCK_TYPES: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "Q4_0": (18, _q4_0, (0,)),
    "Q4_1": (20, _q4_1, (0, 2)),
    "Q5_0": (22, _q5_0, (0,)),
    "Q5_1": (24, _q5_1, (0, 2)),
    "Q8_0": (34, _q8_0, (0,)),
    "Q4_K": (144, _q4_k, (0, 2)),
    "Q5_K": (176, _q5_k, (0, 2)),
    "Q6_K": (210, _q6_k, (208,)),
}
"""Bytes of a block, its reader, and the places of its float16 numbers."""
