"""``--deterministic``: tokens and log probabilities are bitwise equal in any batch and with any chunks."""

import random
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from inprocess import Answer, InProcessEngine

NUM_REQUESTS = 64
NUM_TOKENS = 6


def _prompts() -> list[list[int]]:
    draw = random.Random(4)
    shared = [draw.randrange(3, 97) for _ in range(24)]
    lengths = [draw.randrange(1, 30) for _ in range(NUM_REQUESTS)]
    prompts = [[draw.randrange(3, 97) for _ in range(length)] for length in lengths]
    return [shared + prompt if index % 4 == 0 else prompt for index, prompt in enumerate(prompts)]


def _run(folder: Path, only: list[int] | None = None, **settings: object) -> tuple[dict[int, Answer], InProcessEngine]:
    """Return the answers by request number. ``only``: run just these requests."""
    defaults: dict[str, object] = {"deterministic": True, "block_size": 4, "max_num_seqs": NUM_REQUESTS}
    engine = InProcessEngine(folder, check=False, **(defaults | settings))
    for index, prompt in enumerate(_prompts()):
        if only is None or index in only:
            sampling = {"temperature": 0.8, "seed": index} if index % 3 else {}
            engine.add(str(index), prompt, max_tokens=NUM_TOKENS, logprobs=3, **sampling)
    return {int(name): answer for name, answer in engine.run().items()}, engine


def _same(one: dict[int, Answer], other: dict[int, Answer]) -> None:
    for name, answer in one.items():
        assert len(answer.tokens) == NUM_TOKENS
        assert other[name].tokens == answer.tokens, name
        assert other[name].logprobs == answer.logprobs, name


@pytest.mark.parametrize(
    ("family", "native"),
    [
        pytest.param("llama", "1", id="llama-native"),
        pytest.param("llama", "0", id="llama-torch", marks=pytest.mark.full),
        pytest.param("llama4", "1", id="llama4-native", marks=pytest.mark.full),
        pytest.param("qwen3", "1", id="qwen3-native", marks=pytest.mark.full),
        pytest.param("qwen3", "0", id="qwen3-torch", marks=pytest.mark.slow),
    ],
)
def test_results_are_bitwise_independent_of_the_batch(
    family: str, native: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CPU_NATIVE", native)
    make_checkpoint(tmp_path, family)
    together, _ = _run(tmp_path)
    for index in range(0, NUM_REQUESTS, 9):
        _same(_run(tmp_path, [index])[0], together)
    _same(together, _run(tmp_path, long_prefill_token_threshold=7, async_scheduling=False)[0])
    preempted, engine = _run(tmp_path, num_blocks_override=60, max_num_seqs=16)
    assert engine.statistics().num_preemptions > 0
    assert engine.statistics().prefix_cache_hit_tokens > 0
    _same(together, preempted)
