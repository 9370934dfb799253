"""Both versions of the flash-attn backend against reference attention, with fakes of the libraries or on a GPU."""

import dataclasses

import fake_flash_attn
import numpy as np
import pytest
import torch
from cpu_attention_cases import Ask, Case, Rows, make_case
from dense_attention import DenseBackend
from model_steps import Rows as SteppedRows
from paged_backend_cases import ASKS, PLAIN, STEPS, check, check_attend, in_pages, on_gpu
from tiers import covering

from quire.protocol.model.model_config import ModelConfig
from quire.worker_proc.attention.flash_attn_backend import FlashAttn2, FlashAttn3, FlashAttnBackend
from quire.worker_proc.models.registry import build_model
from quire.worker_proc.startup.loader import init_dummy_weights

BLOCK_SIZE = {FlashAttn3: 4, FlashAttn2: 256}
HEADS = [(4, 4, 8), (6, 2, 16), (7, 1, 64)]


@pytest.fixture(params=[FlashAttn3, FlashAttn2], ids=["3", "2"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FlashAttnBackend:
    fake_flash_attn.install(monkeypatch)
    return FlashAttnBackend(request.param())


def block_size(backend: FlashAttnBackend) -> int:
    return BLOCK_SIZE[type(backend._library)]  # type: ignore[index]


def step(
    backend: FlashAttnBackend, rows: Rows, heads: tuple[int, int, int] = (6, 2, 16), ask: Ask = PLAIN, **more: bool
) -> Case:
    return in_pages(make_case(rows, heads, block_size(backend), torch.float16, ask=ask, **more))


@pytest.mark.parametrize(("name", "ask"), covering(STEPS, ASKS))
def test_equals_reference_attention(backend: FlashAttnBackend, name: str, ask: str) -> None:
    check(backend, step(backend, STEPS[name], ask=ASKS[ask]))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_all_head_group_sizes(backend: FlashAttnBackend, heads: tuple[int, int, int]) -> None:
    check(backend, step(backend, STEPS["mixed"], heads))


def test_layers_that_read_an_earlier_layers_cache(backend: FlashAttnBackend) -> None:
    check(backend, step(backend, STEPS["mixed"], shared=True))


@pytest.mark.parametrize("ask", ASKS)
def test_decode_plan_reads_no_host_lengths(backend: FlashAttnBackend, ask: str) -> None:
    assert not backend.needs_host_lengths
    case = step(backend, STEPS["steady decode"], ask=ASKS[ask])
    nothing = np.zeros(0, np.int32)
    bare = dataclasses.replace(case.batch, query_lens_cpu=nothing, seq_lens_cpu=nothing)
    check(backend, case, backend.plan_decode(bare))


@pytest.mark.parametrize("window", [0, 6])
def test_padding_rows_of_a_decode_step_have_no_effect(backend: FlashAttnBackend, window: int) -> None:
    case = step(backend, STEPS["steady decode"], ask=Ask(window=window))
    batch, nothing = case.batch, np.zeros(0, np.int32)
    rows, last = len(batch.seq_lens), batch.query_start_loc[-1:]
    padded = dataclasses.replace(
        batch,
        query_start_loc=torch.cat([batch.query_start_loc, last, last]),
        seq_lens=torch.cat([batch.seq_lens, torch.zeros(2, dtype=torch.int32)]),
        block_table=torch.cat([batch.block_table, torch.zeros_like(batch.block_table[:2])]),
        slot_mapping=torch.cat([batch.slot_mapping, torch.full((2,), -1)]),
        query_lens_cpu=nothing,
        seq_lens_cpu=nothing,
    )
    assert case.key is not None and case.value is not None
    tensors = [torch.cat([x, torch.full_like(x[:2], float("nan"))]) for x in (case.query, case.key, case.value)]
    out = backend.attend(torch.cat(tensors, 1), case.cache, backend.plan_decode(padded), case.spec, None)
    torch.testing.assert_close(out[:rows].double(), case.expected, atol=3e-3, rtol=3e-3)


def test_attend_computes_norms_rotation_write_and_attention(backend: FlashAttnBackend) -> None:
    check_attend(backend, step(backend, STEPS["mixed"]))


def test_unsupported_settings_are_errors(backend: FlashAttnBackend) -> None:
    with pytest.raises(ValueError, match="flash_attn does not support sinks"):
        check(backend, step(backend, STEPS["mixed"], ask=Ask(sinks=True)))
    case = step(backend, STEPS["mixed"])
    with pytest.raises(ValueError, match=r"torch\.float32.*expected torch\.float16"):
        check(backend, dataclasses.replace(case, cache=case.cache.float()))


def test_error_if_the_library_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash_attn.install(monkeypatch)
    monkeypatch.delattr("flash_attn_interface.flash_attn_with_kvcache")
    with pytest.raises(ImportError, match="too old"):
        FlashAttn3()


@pytest.mark.gpu
@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("version", [FlashAttn3, FlashAttn2], ids=["3", "2"])
def test_library_equals_reference_attention(version: type[FlashAttn3] | type[FlashAttn2], name: str, ask: str) -> None:
    try:
        backend = FlashAttnBackend(version())
    except ImportError as error:
        pytest.skip(str(error))
    case = step(backend, STEPS[name], (8, 2, 64), ASKS[ask])
    check(backend, on_gpu(dataclasses.replace(case, cache=case.cache.nan_to_num(0.0))))


def test_model_with_windows_and_shared_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash_attn.install(monkeypatch)
    config = ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=4,
        num_heads=4, num_kv_heads=2, head_dim=16, qk_norm="head", attention_soft_cap=5.0, windows=[6, 0, 6, 0],
        cache_sources=[0, 1, 2, 1],
    )  # fmt: skip
    model = build_model(config, torch.float16, "cpu", 64)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 97, (length,), generator=generator) for length in (30, 3, 17, 1)]
    with torch.inference_mode():
        init_dummy_weights(model, 3)
        for weight in model.parameters():
            weight.mul_(6.0 if weight.dim() == 2 else 1.0)  # otherwise attention is negligible beside the residual
        answers = [
            SteppedRows(model, [len(prompt) for prompt in prompts], backend).run_in_pieces(prompts)
            for backend in (FlashAttnBackend(FlashAttn3()), DenseBackend())
        ]
    for logits, expected in zip(*answers, strict=True):
        torch.testing.assert_close(logits, expected, atol=0.02 * expected.std().item(), rtol=0.02)
