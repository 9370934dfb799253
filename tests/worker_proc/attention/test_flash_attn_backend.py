"""The flash-attn backend, both versions, against attention written out row by row: with stand-ins for the libraries
here, with the libraries on a GPU."""

import dataclasses

import fake_flash_attn
import numpy as np
import pytest
import torch
from cpu_attention_cases import OUTSIDE, Ask, Case, Rows, make_case
from dense_attention import DenseBackend
from model_steps import Rows as SteppedRows

from quire.protocol.model.model_config import ModelConfig
from quire.worker_proc.attention.backend import AttentionSpec, Rotary, StepBatch
from quire.worker_proc.attention.flash_attn_backend import FlashAttn2, FlashAttn3, FlashAttnBackend
from quire.worker_proc.models.registry import build_model
from quire.worker_proc.startup.loader import init_dummy_weights

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
BLOCK_SIZE = {FlashAttn3: 4, FlashAttn2: 256}

STEPS: dict[str, Rows] = {
    "one decode": [(9, 1)],
    "steady decode": [(20, 1), (300, 1), (0, 1), (22, 1)],
    "whole prompts": [(0, 13), (0, 2), (0, 13)],
    "mixed": [(40, 1), (0, 11), (12, 5), (270, 1), (0, 1), (256, 6)],
}
PLAIN = Ask()
ASKS = {
    "plain": PLAIN,
    "window of one": Ask(window=1),
    "wide window": Ask(window=260),
    "window and cap": Ask(window=17, soft_cap=3.0),
}
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
    """A case with the cache as this backend lays it out, and what a window hides in a row's own first block written."""
    case = make_case(rows, heads, block_size(backend), torch.float16, ask=ask, **more)
    cache, batch = case.cache.transpose(2, 3).contiguous(), case.batch
    for row, first in enumerate(batch.first_visible.tolist()):
        cache[:, batch.block_table[row, first // batch.block_size], : first % batch.block_size] = 50.0
    return dataclasses.replace(case, cache=cache)


def check(backend: FlashAttnBackend, case: Case, plan_of: StepBatch | None = None) -> None:
    plan = backend.plan(case.batch) if plan_of is None else backend.plan_decode(plan_of)
    out = backend.forward(case.query, case.key, case.value, case.cache, plan, case.spec)
    assert out.dtype is case.query.dtype and out.shape == case.query.shape
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double().cpu(), case.expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("name", STEPS)
def test_equals_attention_row_by_row(backend: FlashAttnBackend, name: str, ask: str) -> None:
    check(backend, step(backend, STEPS[name], ask=ASKS[ask]))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_any_group_of_heads(backend: FlashAttnBackend, heads: tuple[int, int, int]) -> None:
    check(backend, step(backend, STEPS["mixed"], heads))


def test_layers_that_read_an_earlier_ones_cache(backend: FlashAttnBackend) -> None:
    check(backend, step(backend, STEPS["mixed"], shared=True))


@pytest.mark.parametrize("ask", ASKS)
def test_a_decode_step_is_planned_from_the_device_alone(backend: FlashAttnBackend, ask: str) -> None:
    assert not backend.needs_host_lengths
    case = step(backend, STEPS["steady decode"], ask=ASKS[ask])
    nothing = np.zeros(0, np.int32)
    check(backend, case, dataclasses.replace(case.batch, query_lens_cpu=nothing, seq_lens_cpu=nothing))


@pytest.mark.parametrize("window", [0, 6])
def test_padding_rows_of_a_decode_step_are_nobodys(backend: FlashAttnBackend, window: int) -> None:
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
    out = backend.forward(*tensors, case.cache, backend.plan_decode(padded), case.spec)
    torch.testing.assert_close(out[:rows].double(), case.expected, atol=3e-3, rtol=3e-3)


def test_attend_is_norms_rotation_write_and_attention(backend: FlashAttnBackend) -> None:
    case = step(backend, STEPS["mixed"])
    qkv, spec, rotary = projection(case)
    caches = [case.cache.nan_to_num(0.0) for _ in range(2)]
    out = backend.attend(qkv.clone(), caches[0], backend.plan(case.batch), spec, rotary)
    dense = DenseBackend()
    case.batch.block_table[case.batch.block_table == OUTSIDE] = 0
    expected = dense.attend(qkv.clone(), caches[1], dense.plan(case.batch), spec, rotary)
    torch.testing.assert_close(out, expected, atol=4e-3, rtol=4e-3)
    torch.testing.assert_close(caches[0], caches[1], atol=4e-3, rtol=4e-3)
    queries = backend.attend(qkv[:, : spec.num_heads].clone(), caches[0], backend.plan(case.batch), spec, rotary)
    torch.testing.assert_close(queries, out)


def projection(case: Case) -> tuple[torch.Tensor, AttentionSpec, Rotary]:
    """What a layer with head norms and rotation hands to ``attend``."""
    generator = torch.Generator().manual_seed(5)
    spec, tokens = case.spec, len(case.query)
    width = spec.num_heads + 2 * spec.num_kv_heads
    qkv = torch.randn(tokens, width, spec.head_dim, generator=generator).half()
    weights = [1 + 0.1 * torch.randn(spec.head_dim, generator=generator).half() for _ in range(2)]
    angles = torch.randn(400, spec.head_dim // 2, generator=generator)
    sines = torch.cat([-angles.sin(), angles.sin()], -1)
    table = torch.stack([torch.cat([angles.cos(), angles.cos()], -1), sines]).half()
    positions = torch.cat(
        [torch.arange(int(total) - int(new), int(total)) for new, total in
         zip(case.batch.query_lens_cpu, case.batch.seq_lens_cpu, strict=True)]
    )  # fmt: skip
    return qkv, dataclasses.replace(spec, q_norm=weights[0], k_norm=weights[1]), Rotary(table, positions)


def test_what_it_has_not_is_an_error_and_not_a_wrong_answer(backend: FlashAttnBackend) -> None:
    with pytest.raises(ValueError, match="flash_attn has no sinks"):
        check(backend, step(backend, STEPS["mixed"], ask=Ask(sinks=True)))
    case = step(backend, STEPS["mixed"])
    with pytest.raises(ValueError, match=r"torch\.float32.*expected torch\.float16"):
        check(backend, dataclasses.replace(case, cache=case.cache.float()))


def test_a_library_without_the_function_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash_attn.install(monkeypatch)
    monkeypatch.delattr("flash_attn_interface.flash_attn_with_kvcache")
    with pytest.raises(ImportError, match="too old"):
        FlashAttn3()


@pytest.mark.gpu
@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("version", [FlashAttn3, FlashAttn2], ids=["3", "2"])
def test_the_library_equals_attention_row_by_row(
    version: type[FlashAttn3] | type[FlashAttn2], name: str, ask: str
) -> None:
    try:
        backend = FlashAttnBackend(version())
    except ImportError as error:
        pytest.skip(str(error))
    check(backend, on_gpu(step(backend, STEPS[name], (8, 2, 64), ASKS[ask])))


def on_gpu(case: Case) -> Case:
    """With numbers in slots that nobody wrote, and the null block where a table means nothing, as in the engine."""
    batch = case.batch
    batch.block_table[batch.block_table == OUTSIDE] = 0
    fields = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    moved = dataclasses.replace(batch, **{name: getattr(batch, name).cuda() for name in fields})
    assert case.key is not None and case.value is not None
    return dataclasses.replace(
        case, batch=moved, cache=case.cache.nan_to_num(0.0).cuda(), query=case.query.cuda(), key=case.key.cuda(),
        value=case.value.cuda(),
    )  # fmt: skip


def test_a_model_with_windows_and_shared_caches_runs_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
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
            weight.mul_(6.0 if weight.dim() == 2 else 1.0)  # else attention hardly counts beside the residual
        answers = [
            SteppedRows(model, [len(prompt) for prompt in prompts], backend).run_in_pieces(prompts)
            for backend in (FlashAttnBackend(FlashAttn3()), DenseBackend())
        ]
    for logits, expected in zip(*answers, strict=True):
        torch.testing.assert_close(logits, expected, atol=0.02 * expected.std().item(), rtol=0.02)
