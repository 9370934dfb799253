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

    def dequantise(self, rows: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        """Return some rows of the weight, float32 ``[rows, inputs]``. ``rows``: a slice or int64 indices."""
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
    together = octets.contiguous()  # a third of the time of strided bytes
    return torch.stack([together & 15, together >> 4], -2).flatten(-2)


def _fifth_bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return bits 4 of 32 codes, uint8 ``[blocks, 32]``, from a word with the first code's bit lowest."""
    word = blocks[:, at : at + 4].flatten().clone().view(torch.int32)[:, None]  # at any alignment
    bits = torch.arange(32, dtype=torch.int32, device=blocks.device)
    return (word >> bits).to(torch.uint8).bitwise_and_(1).bitwise_left_shift_(4)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return nibbles(blocks[:, 2:]).float().sub_(INT4_ZERO).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return nibbles(blocks[:, 4:]).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = nibbles(blocks[:, 6:]).bitwise_or_(_fifth_bits(blocks, 2))
    return codes.float().sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = nibbles(blocks[:, 8:]).bitwise_or_(_fifth_bits(blocks, 4))
    return codes.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


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
    scaled = codes.float().mul_((_half(blocks, 0) * scales)[..., None])
    return scaled.sub_((_half(blocks, 2) * minima)[..., None])


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _grouped(blocks, nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    codes = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    fifth = blocks[:, 16:48].contiguous()
    high = torch.stack([fifth >> bit for bit in range(8)], 1).bitwise_and_(1).bitwise_left_shift_(4)
    return _grouped(blocks, codes.bitwise_or_(high))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    codes = nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 32)
    high = torch.stack([pairs >> shift for shift in (0, 2, 4, 6)], 2).bitwise_and_(3).bitwise_left_shift_(4)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    return codes.bitwise_or_(high).float().sub_(32).view(-1, 16, 16).mul_(scales[..., None])


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
