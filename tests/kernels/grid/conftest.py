"""Fixtures of the kernel grids: the device, and batches whose unused memory is poisoned with NaN.

The interpreter is slow: ``--cases first`` runs the first case of each test, ``--cases even`` and ``--cases odd`` run
every second case, the first of them with ``even``.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from cpu_attention_cases import last_keys_of

from quire.kernels.attention.attention_work import Visible
from quire.worker_proc.attention.backend import StepBatch

UNREADABLE_BLOCK_ID = 2**30
"""Block id in a block table past a row's end and before its window: a kernel that uses it reads outside the cache."""


@dataclass(frozen=True)
class PagedCase:
    """A step, its new keys and values, and a KV cache with the rows' earlier visible tokens and NaN everywhere else.

    ``filled_cache`` is ``kv_cache`` with the new keys and values written. ``num_tokens`` counts the rows' tokens; the
    tensors of the step are longer by ``padding``.
    """

    batch: StepBatch
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_cache: torch.Tensor
    filled_cache: torch.Tensor
    num_tokens: int


MakeCase = Callable[..., PagedCase]


RUNS: dict[str, Callable[[int], bool]] = {
    "all": lambda number: True,
    "first": lambda number: number == 0,
    "even": lambda number: number % 2 == 0,
    "odd": lambda number: number % 2 == 1,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", choices=RUNS, default="all", help="which cases of each test")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    runs = RUNS[config.option.cases]
    seen: Counter[str] = Counter()
    left_out = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        if not runs(seen[test]):
            left_out.append(item)
        seen[test] += 1
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def interpreted() -> bool:
    # Imported here, because pytest loads this file without triton too.
    import triton

    return bool(triton.knobs.runtime.interpret)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if interpreted() else "cuda")


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    # The interpreter stores bfloat16 as raw bits and computes with these: the results are wrong, without an error.
    if request.param is torch.bfloat16 and interpreted():
        pytest.skip("Triton's interpreter computes bfloat16 wrongly")
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def main_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The dtypes for tests in which float16 adds no coverage: the interpreter is slow."""
    if request.param is torch.bfloat16 and interpreted():
        pytest.skip("Triton's interpreter computes bfloat16 wrongly")
    return request.param


@pytest.fixture
def make_case(device: torch.device) -> MakeCase:
    def make(
        query_lens: list[int],
        seq_lens: list[int],
        dtype: torch.dtype,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 32,
        block_size: int = 16,
        padding: int = 0,
        *,
        window: int = 0,
        chunk: int = 0,
        prefix_len: int = 0,
        images: tuple[tuple[int, int], ...] = (),
        cache_dtype: torch.dtype | None = None,
    ) -> PagedCase:
        rng = torch.Generator().manual_seed(7)
        blocks_of_row = [-(-seq_len // block_size) for seq_len in seq_lens]
        num_blocks = sum(blocks_of_row) + 3
        free = torch.randperm(num_blocks, generator=rng).tolist()
        block_table = torch.full((len(seq_lens), max(blocks_of_row) + 2), UNREADABLE_BLOCK_ID, dtype=torch.int32)
        # float32 until it is filled, because 8-bit floats cannot be indexed.
        cache = torch.full((2, num_blocks * block_size, num_kv_heads, head_dim), torch.nan)
        filled = cache.clone()
        slot_mapping = torch.full((sum(query_lens) + padding,), -1, dtype=torch.int64)
        fresh = torch.zeros((2, len(slot_mapping), num_kv_heads, head_dim), dtype=dtype)
        start = 0
        for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
            block_ids = torch.tensor([free.pop() for _ in range(blocks_of_row[row])], dtype=torch.int64)
            shared = prefix_len // block_size
            if row:
                block_ids[:shared] = block_table[0, :shared]
            cached_len = seq_len - query_len
            visible = Visible(window, chunk).first_key(np.array([cached_len])).item()
            block_table[row, visible // block_size : len(block_ids)] = block_ids[visible // block_size :]
            position = torch.arange(visible, seq_len)
            slots = block_ids[position // block_size] * block_size + position % block_size
            tokens = torch.randn(2, len(slots), num_kv_heads, head_dim, generator=rng).to(dtype)
            filled[:, slots] = tokens.float()
            cached = position < cached_len
            cache[:, slots[cached]] = tokens[:, cached].float()
            fresh[:, start : start + query_len] = tokens[:, ~cached]
            slot_mapping[start : start + query_len] = slots[~cached]
            start += query_len
        query = torch.randn(len(slot_mapping), num_heads, head_dim, generator=rng).to(dtype)
        query[start:] = torch.nan
        rows = [(seq - query, query) for query, seq in zip(query_lens, seq_lens, strict=True)]

        def as_cache(flat: torch.Tensor) -> torch.Tensor:
            return flat.view(2, num_blocks, block_size, num_kv_heads, head_dim).to(cache_dtype or dtype).to(device)

        batch = StepBatch(
            query_start_loc=torch.tensor(np.cumsum([0, *query_lens]), dtype=torch.int32, device=device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            block_table=block_table.to(device),
            slot_mapping=slot_mapping.to(device),
            query_lens_cpu=np.array(query_lens, dtype=np.int32),
            seq_lens_cpu=np.array(seq_lens, dtype=np.int32),
            block_size=block_size,
            window=window,
            chunk=chunk,
            last_keys=last_keys_of(rows, images) if images else None,
        )
        return PagedCase(
            batch=batch,
            query=query.to(device),
            key=fresh[0].to(device),
            value=fresh[1].to(device),
            kv_cache=as_cache(cache),
            filled_cache=as_cache(filled),
            num_tokens=start,
        )

    return make
