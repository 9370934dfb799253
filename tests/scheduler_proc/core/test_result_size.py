"""Steps whose vectors and routed experts would exceed the size of a result: the rest is for later steps."""

import pytest
from fake_worker import contexts_of, pooled_row, routed_row
from scheduler_driver import Driver

from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.model.pooling_config import PoolingConfig
from quire.protocol.request.pooling_params import PoolingParams
from quire.protocol.wire.front_end_messages import EndReason
from quire.protocol.wire.worker_messages import ModelRunnerOutput
from quire.scheduler_proc.features import result_bytes
from quire.scheduler_proc.trace.lines import encode_line

PROMPT = list(range(100, 120))
POOLING = PoolingConfig(tasks=["embed", "token_embed"], size=6)
NO_KV = KVLayout([], num_kv_heads=1, head_dim=4, dtype="float32")


def results_of(driver: Driver) -> list[ModelRunnerOutput]:
    """Run until all requests have ended, which takes less than 200 steps."""
    results = []
    for _ in range(200):
        driver.schedule()
        result = driver.answer()
        if result is not None:
            results.append(result)
    driver.check_drained()
    assert driver.replay_lines() is None
    return results


@pytest.mark.parametrize("is_encoder", [False, True])
def test_vectors_of_all_tokens(is_encoder: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result has room for two and a half prompts; an encoder computes only whole ones."""
    monkeypatch.setattr(result_bytes, "MAX_STEP_SIDE_BYTES", 50 * 6 * 4)
    whole = {"generates": False, "enable_chunked_prefill": False, "num_blocks": 2, "layout": NO_KV}
    driver = Driver(pooling=POOLING, max_num_batched_tokens=512, max_num_seqs=16, **(whole if is_encoder else {}))
    if not is_encoder:
        driver.add("chat", [1, 2], max_tokens=20)
    for number in range(6):
        driver.add(f"e{number}", [*PROMPT[1:], number], pooling=PoolingParams("token_embed"))
    driver.add("last", PROMPT, pooling=PoolingParams())
    sizes = [rows.floats[0].nbytes for result in results_of(driver) for rows in result.side]
    assert sizes == ([40 * 24, 40 * 24, 41 * 24] if is_encoder else [50 * 24, 50 * 24, 21 * 24])
    for number in range(6):
        answer = driver.answers[f"e{number}"]
        rows = [pooled_row(context, 6) for context in contexts_of([*PROMPT[1:], number])]
        assert answer.reason is EndReason.STOPPED and answer.pooled == dict(enumerate(rows))
    assert any(b"result_size" in encode_line(line) for line in driver.lines())


def test_one_vector_of_each_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_bytes, "MAX_STEP_SIDE_BYTES", 3 * 6 * 4)
    driver = Driver(pooling=POOLING, max_num_batched_tokens=512, max_num_seqs=16)
    for number in range(7):
        driver.add(f"e{number}", [*PROMPT, number], pooling=PoolingParams())
    sizes = [len(rows) for result in results_of(driver) for rows in result.side]
    assert sizes == [3, 3, 1]


def test_routed_experts_of_prefix_hits_and_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result has room for the experts of three prompts, of which 20 tokens come from the prefix cache."""
    monkeypatch.setattr(result_bytes, "MAX_STEP_SIDE_BYTES", 3 * 21 * 2 * 4)
    driver = Driver(enable_return_routed_experts=True, max_num_batched_tokens=512, max_num_seqs=16)
    driver.add("first", PROMPT, max_tokens=9, return_routed_experts=True)
    driver.step(2)
    for number in range(5):
        driver.add(f"r{number}", [*PROMPT, number], max_tokens=9, return_routed_experts=True)
        driver.add(f"f{number}", [], forked_from="first", max_tokens=9, return_routed_experts=True)
    largest = max(len(rows.ints[0]) for result in results_of(driver) for rows in result.side)
    assert largest <= (3 * 21 + 16) * 2, "decoding requests add a row each"
    prompts = {"first": PROMPT} | {f"r{number}": [*PROMPT, number] for number in range(5)}
    for name, prompt in prompts.items():
        answer = driver.answers[name]
        assert answer.reason is EndReason.LENGTH
        rows = [routed_row(context) for context in contexts_of([*prompt, *answer.tokens])]
        assert answer.experts == dict(enumerate(rows[:-1]))
    assert all(driver.answers[f"f{number}"].reason is EndReason.LENGTH for number in range(5))
