"""Implementations that guarantee it: a query's result depends, bit for bit, on its own query, keys and values alone."""

from collections.abc import Iterator

import pytest
import torch
from cpu_attention_cases import Ask, empty_cache, make_batch, make_spec
from tiers import thinned

from quire.kernels.cpu.native.library import load_native
from quire.worker_proc.attention.backend import Rotary
from quire.worker_proc.attention.cpu import CpuBackend

BLOCK = 16
HEADS = {"native": (9, 3, 64), "fixed": (4, 2, 24)}
LENGTHS = {"native": [530, 150, 64, 129, 1], "fixed": [150, 40]}
ASKS = {
    "plain": Ask(),
    "window": Ask(window=150),
    "chunks": Ask(chunk=90),
    "images": Ask(window=90, images=((14, 21), (70, 77), (252, 259))),  # none ends inside a piece of 7
    "everything": Ask(window=90, soft_cap=5.0, sinks=True),
}


@pytest.fixture(params=["native", "fixed"])
def way(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and load_native() is None:
        pytest.skip("no C++ compiler")
    return str(request.param)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Rows:
    """Prompts with fixed projections, fed to one layer in chunks; each row has its own blocks."""

    def __init__(self, way: str, ask: Ask, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
        self.ask, self.heads, self.lengths = ask, HEADS[way], LENGTHS[way]
        self.backend = CpuBackend(native=way == "native", deterministic=True)
        self.cache_dtype = cache_dtype
        self.spec = make_spec(self.heads, ask)
        heads, kv_heads, dim = self.heads
        generator = torch.Generator().manual_seed(2)
        self.qkv = [torch.randn(n, heads + 2 * kv_heads, dim, generator=generator).to(dtype) for n in self.lengths]
        angles = torch.rand(max(self.lengths), dim // 2, generator=generator)
        table = torch.stack((torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)))
        self.table = table.to(dtype)
        self.blocks = [
            torch.arange(-(-n // BLOCK), dtype=torch.int32) + 1 + 100 * i for i, n in enumerate(self.lengths)
        ]

    def feed(self, members: list[int], piece: int) -> list[torch.Tensor]:
        """Compute all tokens of ``members`` together, at most ``piece`` per row and step; return each row's results."""
        _, kv_heads, dim = self.heads
        cache = empty_cache(1 + 100 * len(self.lengths), kv_heads, BLOCK, dim, self.cache_dtype)
        done = dict.fromkeys(members, 0)
        out: dict[int, list[torch.Tensor]] = {row: [] for row in members}
        while True:
            new = {row: min(piece, self.lengths[row] - at) for row, at in done.items() if at < self.lengths[row]}
            if not new:
                return [torch.cat(out[row]) for row in members]
            attended = self._step(done, new, cache)
            for row, tokens in zip(new, attended.split(list(new.values())), strict=True):
                out[row].append(tokens)
                done[row] += len(tokens)

    def _step(self, done: dict[int, int], new: dict[int, int], cache: torch.Tensor) -> torch.Tensor:
        table = torch.zeros(len(new), 60, dtype=torch.int32)
        for i, row in enumerate(new):
            table[i, : len(self.blocks[row])] = self.blocks[row]
        batch = make_batch([(done[row], count) for row, count in new.items()], table, BLOCK, self.ask)
        qkv = torch.cat([self.qkv[row][done[row] : done[row] + count] for row, count in new.items()])
        positions = torch.cat([torch.arange(done[row], done[row] + count) for row, count in new.items()])
        plan = self.backend.plan(batch)
        return self.backend.attend(qkv, cache, plan, self.spec, Rotary(self.table, positions))


@pytest.mark.parametrize("ask", thinned(ASKS, keep=1))
def test_results_do_not_depend_on_batch_and_chunks(way: str, ask: str) -> None:
    for dtype, cache_dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        rows = Rows(way, ASKS[ask], dtype, cache_dtype)
        everyone = list(range(len(rows.lengths)))
        together = rows.feed(everyone, 1000)
        alone = [rows.feed([row], 1000)[0] for row in everyone]
        pieces = rows.feed(everyone, 7)
        for one, other, third in zip(together, alone, pieces, strict=True):
            assert torch.equal(one, other) and torch.equal(one, third)


def test_results_of_prefill_and_decode_are_equal(way: str) -> None:
    rows = Rows(way, Ask(), torch.float32, torch.float8_e4m3fn)
    everyone = list(range(len(rows.lengths)))[1:]
    for whole, decoded in zip(rows.feed(everyone, 1000), rows.feed(everyone, 1), strict=True):
        assert torch.equal(whole, decoded)


def test_results_do_not_depend_on_threads(way: str) -> None:
    rows = Rows(way, Ask(), torch.float32, torch.float32)
    outs = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        outs.append([*rows.feed([0], 299), *rows.feed([1], 16)])
    for out in outs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(outs[0], out, strict=True))


def test_results_do_not_depend_on_later_tokens(way: str) -> None:
    rows = Rows(way, Ask(), torch.float32, torch.float32)
    before = rows.feed([1], 40)[0]
    rows.qkv[1][50:] *= 3.0
    assert torch.equal(rows.feed([1], 40)[0][:50], before[:50])
