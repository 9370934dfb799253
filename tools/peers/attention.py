"""Attention kernels of other libraries over the same KV cache, for ``quire bench kernels``, if they are installed."""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from quire.bench.worker.paged_case import PagedCase
from quire.bench.worker.timing import Call

_WORKSPACE_BYTES = 256 << 20


def flashinfer_decode(case: PagedCase) -> list[Call]:
    """FlashInfer's decode wrapper over pages of the same cache; planning is not timed, as for Quire's kernel."""
    import flashinfer  # type: ignore[import-not-found, unused-ignore]

    heads, device = case.heads, case.query.device
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    counts = -(-case.seq_lens_cpu // heads.block_size)
    starts = torch.tensor([0, *counts.cumsum()], dtype=torch.int32, device=device)
    last = torch.from_numpy((case.seq_lens_cpu - 1) % heads.block_size + 1).to(device)

    def call(table: torch.Tensor) -> Call:
        ids = torch.cat([table[row, : int(count)] for row, count in enumerate(counts)])
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(
            starts,
            ids,
            last,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            heads.block_size,
            q_data_type=case.query.dtype,
            kv_data_type=case.kv_cache.dtype,
        )
        caches = (case.kv_cache[0], case.kv_cache[1])
        return lambda: wrapper.run(case.query, caches)

    # A wrapper plans into its workspace, so each copy of the tables would need its own. Time the first copy only.
    return [call(case.tables[0])]


def flash_attn_decode(case: PagedCase) -> list[Call]:
    """flash_attn over contiguous keys, because it would need pages of 256 tokens."""
    import flash_attn  # type: ignore[import-not-found, unused-ignore]

    query = case.query.unsqueeze(1)

    def call(copy: int) -> Call:
        keys, values = case.dense(copy)
        return lambda: flash_attn.flash_attn_with_kvcache(query, keys, values, cache_seqlens=case.seq_lens)

    return [call(copy) for copy in range(len(case.tables))]


def vllm_decode(case: PagedCase) -> list[Call]:
    """vLLM's Triton kernel, from the module that has it in this release."""
    kernel = _vllm_kernel()
    out = torch.empty_like(case.query)
    longest = int(case.seq_lens_cpu.max())

    def call(table: torch.Tensor) -> Call:
        return lambda: kernel(
            q=case.query,
            k=case.kv_cache[0],
            v=case.kv_cache[1],
            out=out,
            cu_seqlens_q=case.query_start_loc,
            max_seqlen_q=1,
            seqused_k=case.seq_lens,
            max_seqlen_k=longest,
            softmax_scale=case.heads.head_dim**-0.5,
            causal=True,
            window_size=(-1, -1),
            block_table=table,
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
        )

    return [call(table) for table in case.tables]


def _vllm_kernel() -> Any:
    for module in ("vllm.v1.attention.ops.triton_unified_attention", "vllm.attention.ops.triton_unified_attention"):
        try:
            return importlib.import_module(module).unified_attention
        except ModuleNotFoundError:
            continue
    raise ImportError("unified_attention not found in vllm.v1.attention.ops or vllm.attention.ops")


def rivals() -> dict[str, Callable[[PagedCase], list[Call]]]:
    """Return, by column name, the function that makes the calls of a case."""
    known = {
        "flashinfer": ("FlashInfer", flashinfer_decode),
        "flash_attn": ("flash_attn, dense", flash_attn_decode),
        "vllm": ("vLLM Triton", vllm_decode),
    }
    return {column: make for module, (column, make) in known.items() if importlib.util.find_spec(module)}
