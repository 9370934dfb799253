"""The references against worked examples and dense attention, and what launchers refuse. None of this needs triton."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from quire.kernels.cache_write import write_cache_reference
from quire.kernels.checks import check_tensor
from quire.kernels.paged_attention import paged_attention, paged_attention_reference, plan_tiles
from quire.kernels.triton_runtime import require_launchable

CPU = torch.device("cpu")


@pytest.mark.parametrize("query_len", [1, 5, 13])
def test_paged_attention_reference_equals_dense_attention(query_len: int) -> None:
    rng = torch.Generator().manual_seed(0)
    seq_len, num_heads, num_kv_heads, head_dim, block_size = 13, 6, 2, 8, 4
    blocks = torch.tensor([3, 1, 5, 2])
    cache = torch.full((2, 6, block_size, num_kv_heads, head_dim), torch.nan, dtype=torch.float64)
    key, value = torch.randn(2, seq_len, num_kv_heads, head_dim, generator=rng, dtype=torch.float64)
    position = torch.arange(seq_len)
    write_cache_reference(key, value, cache, blocks[position // block_size] * block_size + position % block_size)
    query = torch.randn(query_len, num_heads, head_dim, generator=rng, dtype=torch.float64)
    result = paged_attention_reference(
        query, cache, blocks[None].int(), torch.tensor([0, query_len]), torch.tensor([seq_len]), 0.3
    )
    mask = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()[seq_len - query_len :]
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(0, 1)[None] for t in (query, key, value)), attn_mask=mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(result, dense[0].transpose(0, 1))


@pytest.mark.parametrize(
    ("query_lens", "tile_tokens", "table"),
    [
        ([1, 1], 1, [[0, 0], [1, 0]]),
        ([0, 1, 0], 1, [[1, 0]]),
        ([3, 1, 8], 8, [[0, 0], [1, 0], [2, 0]]),
        ([1, 130, 64], 64, [[0, 0], [1, 0], [1, 64], [1, 128], [2, 0]]),
        ([], 1, []),
        ([0], 1, []),
    ],
)
def test_tiles_cover_every_token(query_lens: list[int], tile_tokens: int, table: list[list[int]]) -> None:
    tiles = plan_tiles(np.array(query_lens, dtype=np.int32), CPU)
    assert tiles.tile_tokens == tile_tokens
    assert tiles.num_tokens == sum(query_lens)
    assert tiles.table.dtype == torch.int32
    assert tiles.table.tolist() == table


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3), r"key: expected the dimensions \[num_tokens, head_dim\], got shape \(3,\)"),
        (torch.zeros(3, 5), r"key: dimension 1 \(head_dim\) is 5, expected 4"),
        (torch.zeros(3, 4, dtype=torch.int8), r"key: dtype is torch.int8, expected torch.float32 or torch.float16"),
        (torch.zeros(3, 4, device="meta"), r"key: device is meta, expected cpu"),
        (torch.zeros(4, 3).T, r"key: the innermost dimension \(head_dim\) has stride 3, expected 1"),
    ],
)
def test_an_error_names_the_tensor_and_the_dimension(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tensor("key", tensor, {"num_tokens": None, "head_dim": 4}, (torch.float32, torch.float16), CPU)


def test_launchers_refuse_wrong_tensors_before_anything_else() -> None:
    starts = torch.zeros(3, dtype=torch.int32)
    table = torch.zeros(2, 4, dtype=torch.int32)
    cache = torch.zeros(2, 3, 8, 2, 16)
    tiles = plan_tiles(np.array([5, 0], dtype=np.int32), CPU)
    with pytest.raises(ValueError, match=r"query: dimension 1 \(num_heads\) is 3, not a multiple of 2 KV heads"):
        paged_attention(torch.zeros(5, 3, 16), cache, table, starts, starts[:2], tiles, 1.0)


def test_launchers_import_without_triton_and_say_what_a_launch_needs() -> None:
    script = """
import sys
import quire.kernels.cache_write, quire.kernels.paged_attention, quire.kernels.slot_mapping
from quire.worker_proc.attention.triton_backend import TritonBackend
assert "triton" not in sys.modules
sys.modules["triton"] = None  # what Python takes for a missing package
try:
    TritonBackend()
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-P", "-c", script], check=True, capture_output=True, text=True)
    assert "need the triton package" in done.stdout


def test_a_launch_on_the_cpu_needs_the_interpreter() -> None:
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if triton.knobs.runtime.interpret:
        pytest.skip("the interpreter is on")
    with pytest.raises(RuntimeError, match=r"need CUDA, and the tensors are on 'cpu'.*TRITON_INTERPRET=1"):
        require_launchable("cpu")
