"""``n`` answers share one prompt, which is sent and computed once; each equals that of a request of its own."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from lent_engines import TINY
from tiers import thinned

from quire import LLM, SamplingParams
from quire.frontend.engine.session import Session
from quire.protocol.wire.front_end_messages import AddRequest

PROMPT = [*range(3, 40)]
PARAMS = SamplingParams(n=6, seed=5, temperature=1.0, max_tokens=12, ignore_eos=True)
WAYS: dict[str, dict[str, Any]] = {
    "lent": TINY,
    "all at once": {},
    "three rows, no prefix cache": {"max_num_seqs": 3, "enable_prefix_caching": False},
    "few blocks": {"num_gpu_blocks_override": 13},
}


def answers(llm: LLM, *prompts: list[int], params: SamplingParams = PARAMS) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in llm.generate(list(prompts), params)]


@pytest.mark.parametrize(
    ("family", "way"),
    thinned([("qwen3", "lent"), *((family, way) for family in ("llama", "gemma3") for way in list(WAYS)[1:])], keep=1),
)
def test_answers_are_those_of_separate_requests(
    checkpoint_factory: Callable[..., tuple[Path, Any]],
    lend: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    way: str,
) -> None:
    folder, _ = checkpoint_factory(family)
    sent: list[AddRequest] = []
    settings = {"max_model_len": 128, "dtype": "float32", "block_size": 16, **WAYS[way]}
    with nullcontext(lend(folder, **TINY)) if way == "lent" else LLM(folder, **settings) as llm:
        assert llm._calls.client is not None
        post = llm._calls.client.session._post
        monkeypatch.setattr(llm._calls.client.session, "_post", lambda message: (sent.append(message), post(message)))
        together = answers(llm, PROMPT, PROMPT[::-1])
        computed = llm.statistics()
        arrivals = [message for message in sent if isinstance(message, AddRequest)]
        assert sum(len(message.prompt_token_ids) > 0 for message in arrivals) == 2
        assert [len(set(map(tuple, each))) for each in together] == [6, 6]
        add = Session.add
        monkeypatch.setattr(Session, "add", lambda self, request, on_update, parent: add(self, request, on_update))
        llm.reset_prefix_cache()
        assert answers(llm, PROMPT, PROMPT[::-1]) == together
        assert llm.statistics().prefix_cache_hit_tokens >= computed.prefix_cache_hit_tokens
