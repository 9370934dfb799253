"""Attention over latents on a CPU, with the products by head around it: equal to attention over expanded keys."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiers import thinned

from quire.protocol.model.latent_config import LatentConfig
from quire.worker_proc.attention import cpu_expanded
from quire.worker_proc.attention.backend import AttentionSpec, Rotary, SharedPrefix, StepBatch
from quire.worker_proc.attention.cpu import CpuBackend
from quire.worker_proc.attention.cpu_expanded import LatentPart, attend_expanded, latent_parts
from quire.worker_proc.attention.rope import rotate
from quire.worker_proc.models.head_products import TorchHeads, head_products

WAYS = {
    "native": CpuBackend(),
    "torch": CpuBackend(native=False),
    "fixed order": CpuBackend(native=False, deterministic=True),
}
SHAPES = {
    "GLM-4.7-Flash": (20, 512, 64, 192, 256),
    "small": (3, 16, 4, 8, 12),
    "odd": (5, 40, 24, 9, 7),
    "many heads": (64, 32, 8, 16, 16),
}
"""Heads, rank, rotated numbers, other dimensions of keys, dimensions of values."""
STEPS = {
    "decode": [(0, 1), (299, 1), (40, 1)],
    "mixed": [(30, 1), (0, 37), (64, 9), (513, 2)],
}
BLOCK, TABLE = 16, 64


def latent_config(heads: int, rank: int, rope: int, nope: int, value: int) -> LatentConfig:
    return LatentConfig(rank=rank, rope_dim=rope, nope_dim=nope, value_dim=value)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Latents:
    """Rows over one cache, whose other slots are NaN."""

    def __init__(self, shape: tuple[int, ...], rows: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> None:
        self.shape, self.rows = shape, rows
        heads, rank, rope, nope, value = shape
        rng = torch.Generator().manual_seed(1)
        self.wide = torch.randn(heads, nope + value, rank, generator=rng) * rank**-0.5
        self.latents = [torch.randn(sum(row), rope + rank, generator=rng).to(dtype).float() for row in rows]
        self.queries = [torch.randn(sum(row), heads, nope + rope, generator=rng) for row in rows]
        self.table = torch.randperm(TABLE * len(rows), generator=rng).int().view(len(rows), TABLE) + 1
        # Packed: the blocks of another layer lie between those of this one.
        packed = torch.full((TABLE * len(rows) + 1, 2, 1, BLOCK, rope + rank), torch.nan, dtype=dtype)
        self.cache = packed.transpose(0, 1)[:1]
        self.cache[0, 0] = 0
        angles = torch.outer(torch.arange(1024.0), 0.9 ** torch.arange(rope // 2))
        cos, sin = angles.cos(), angles.sin()
        self.angles = torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)))
        self.scale = (nope + rope) ** -0.5
        for row, (context, _) in enumerate(rows):
            rotated = self.rotated(self.latents[row][:, None], torch.arange(sum(rows[row])))[:, 0]
            for position in range(context):
                block, offset = divmod(position, BLOCK)
                self.cache[0, self.table[row, block], 0, offset] = rotated[position].to(dtype)

    def rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rotate(x, *self.angles[:, positions].unsqueeze(2))

    def expected(self) -> torch.Tensor:
        """Attention over the keys and values of all heads, in float64."""
        _, _, rope, nope, _ = self.shape
        outs = []
        for (context, new), latents, queries in zip(self.rows, self.latents, self.queries, strict=True):
            positions = torch.arange(context + new)
            expanded = torch.einsum("tr,hdr->thd", latents[:, rope:].double(), self.wide.double())
            shared = self.rotated(latents[:, None, :rope], positions).double().expand(-1, self.shape[0], -1)
            keys = torch.cat((expanded[..., :nope], shared), -1)
            turned = self.rotated(queries[..., nope:].contiguous(), positions).double()
            query = torch.cat((queries[..., :nope].double(), turned), -1)[context:]
            scores = torch.einsum("qhd,khd->hqk", query, keys) * self.scale
            scores = scores.masked_fill(positions > positions[context:, None], float("-inf"))
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), expanded[..., nope:]))
        return torch.cat(outs)

    def attend(
        self, backend: CpuBackend, *, deterministic: bool = False, expanded: bool = False, prefixes: Any = ()
    ) -> torch.Tensor:
        heads, rank, rope, nope, _ = self.shape
        absorb, values = (
            head_products(each, torch.float32, deterministic=deterministic)
            if backend.native is not None
            else TorchHeads(each, deterministic=deterministic)
            for each in (self.wide[:, :nope].transpose(1, 2), self.wide[:, nope:])
        )
        query = torch.cat([own[context:] for (context, _), own in zip(self.rows, self.queries, strict=True)])
        latents = torch.cat([own[context:] for (context, _), own in zip(self.rows, self.latents, strict=True)])
        positions = [torch.arange(context, context + new) for context, new in self.rows]
        slots = [self.table[row][own // BLOCK].long() * BLOCK + own % BLOCK for row, own in enumerate(positions)]
        new, total = (np.array(each, np.int32) for each in zip(*[(n, c + n) for c, n in self.rows], strict=True))
        starts = torch.from_numpy(np.concatenate([[0], new.cumsum()]).astype(np.int32))
        lens = starts, torch.from_numpy(total), self.table, torch.cat(slots), new, total
        plan = backend.plan(StepBatch(*lens, BLOCK, prefixes=prefixes))
        spec = AttentionSpec(heads, 1, rope + rank, self.scale, value_dim=rank)
        parts = latent_parts(plan, latent_config(*self.shape)) if expanded else [LatentPart(slice(None), plan, None)]
        outs = []
        for part in parts:
            own, some = part.tokens, query[part.tokens]
            rotary = Rotary(self.angles, torch.cat(positions)[own])
            rotated = some[..., nope:]
            if part.blocks is None:
                joined = torch.cat((rotated, absorb(some[..., :nope])), -1)
                joined = torch.cat((joined, latents[own, None]), 1)
                outs.append(values(backend.attend(joined, self.cache, part.plan, spec, rotary)))
            else:
                whole = torch.cat((rotated, some[..., :nope]), -1)
                heads = [head_products(head[None], torch.float32, deterministic=False) for head in self.wide]
                tokens = whole, latents[own, None].clone(), self.cache
                outs.append(attend_expanded(part, *tokens, spec, rotary, heads, self.shape[-1]))
        return torch.cat(outs)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("shape", thinned(SHAPES, keep=2))
def test_absorbed_attention_equals_expanded(shape: str, rows: list[tuple[int, int]], way: str) -> None:
    latents = Latents(SHAPES[shape], rows)
    result = latents.attend(WAYS[way], deterministic=way == "fixed order").double()
    torch.testing.assert_close(result, latents.expected(), atol=1e-4, rtol=1e-4)


PROMPTS = [(30, 1), (0, 37), (64, 90), (70, 2), (513, 1), (500, 130), (0, 9)]
"""Rows between expanded ones are absorbed, alone and together."""


NEEDS_NATIVE = pytest.mark.skipif(WAYS["native"].native is None, reason="no C++ compiler")


@NEEDS_NATIVE
@pytest.mark.parametrize(
    ("shape", "scratch"),
    [("odd", 1), ("many heads", 10**6), pytest.param("GLM-4.7-Flash", 10**6, marks=pytest.mark.full)],
)
def test_expanded_prompts_beside_absorbed_rows(shape: str, scratch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One head at a time, and many; latents in pieces of three blocks; a prefix of rows of both forms."""
    for name, value in (("FEWEST_TOKENS", 37), ("EXPANSION_COST", 0), ("PAIR_COST", 0)):
        monkeypatch.setattr(cpu_expanded, name, value)
    monkeypatch.setattr(cpu_expanded, "SCRATCH_BYTES", scratch)
    monkeypatch.setattr(cpu_expanded, "TOKENS_AT_ONCE", 3 * BLOCK)
    results, caches = [], []
    for expanded in (True, False):
        latents = Latents(SHAPES[shape], PROMPTS)
        latents.latents[5][:256] = latents.latents[4][:256]
        latents.table[5, : 256 // BLOCK] = latents.table[4, : 256 // BLOCK]
        shared = (SharedPrefix(np.array([4, 5]), 256),)
        results.append(latents.attend(WAYS["native"], expanded=expanded, prefixes=shared).double())
        caches.append(latents.cache)
        torch.testing.assert_close(results[-1], latents.expected(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(*caches, atol=1e-6, rtol=0, equal_nan=True)


@NEEDS_NATIVE
@pytest.mark.parametrize(
    ("context", "new", "deterministic", "count"),
    [(0, 127, False, 0), (0, 128, False, 1), (4096, 256, False, 0), (4096, 512, False, 1), (4096, 512, True, 0)],
)
def test_prompts_are_expanded_where_that_is_faster(context: int, new: int, deterministic: bool, count: int) -> None:
    total = np.array([context + new], np.int32)
    step = torch.tensor([0, new]).int(), torch.from_numpy(total), torch.zeros(1, 512).int(), torch.arange(new)
    plan = CpuBackend(deterministic=deterministic).plan(StepBatch(*step, np.array([new], np.int32), total, BLOCK))
    assert len(latent_parts(plan, latent_config(*SHAPES["GLM-4.7-Flash"]))) == count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_caches(dtype: torch.dtype) -> None:
    """The cache has the rounded numbers, whose rotation rounds once more."""
    latents = Latents(SHAPES["GLM-4.7-Flash"], STEPS["mixed"], dtype)
    result = latents.attend(WAYS["native"]).double()
    torch.testing.assert_close(result, latents.expected(), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("way", ["native", "fixed order"])
@pytest.mark.parametrize("shape", ["small", "many heads"])
def test_bits_depend_on_neither_batch_nor_chunks_nor_threads(shape: str, way: str) -> None:
    backend = WAYS[way]
    whole = Latents(SHAPES[shape], [(0, 40), (300, 3)]).attend(backend, deterministic=True)
    torch.set_num_threads(1)
    try:
        parts = Latents(SHAPES[shape], [(0, 40), (300, 3)])
        first = []
        for start, end in ((0, 7), (7, 8), (8, 40)):
            own = Latents(SHAPES[shape], [(0, 40), (300, 3)])
            own.cache, own.rows = parts.cache, [(start, end - start)]
            own.queries[0], own.latents[0] = own.queries[0][:end], own.latents[0][:end]
            del own.queries[1:], own.latents[1:]
            first.append(own.attend(backend, deterministic=True))
    finally:
        torch.set_num_threads(2)
    assert torch.equal(torch.cat(first), whole[:40])


def test_a_cache_with_values_is_refused() -> None:
    latents = Latents(SHAPES["small"], [(0, 2)])
    latents.cache = latents.cache.expand(2, -1, -1, -1, -1).contiguous()
    with pytest.raises(ValueError, match="2 parts do not match the layer"):
        latents.attend(WAYS["native"])
