"""Sampling parameters through the offline API, with real processes and the demo model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lent_engines import DEMO

from quire import LLM, RepetitionDetection, SamplingParams, StructuredOutputs
from quire.protocol.errors import ConfigError, InvalidRequest

PROMPT = "Once upon a time"


@pytest.fixture
def llm(lend: Callable[..., LLM]) -> LLM:
    return lend(**DEMO)


def ask(llm: LLM, prompt: Any = PROMPT, **params: Any) -> Any:
    return llm.generate(prompt, SamplingParams(**{"temperature": 0.0, "max_tokens": 20, **params}))[0]


def text(llm: LLM, **params: Any) -> str:
    answer: str = ask(llm, **params).outputs[0].text
    return answer


class TestParameters:
    def test_biases_and_allowed_tokens(self, llm: LLM) -> None:
        assert ask(llm, logit_bias={65: 100.0}, max_tokens=4).outputs[0].token_ids == [65] * 4
        ids = ask(llm, allowed_token_ids=[65, 66], temperature=1.0, seed=1).outputs[0].token_ids
        assert set(ids) == {65, 66}

    def test_bad_words_are_excluded_with_and_without_a_blank(self, llm: LLM) -> None:
        free = text(llm)
        word = next(word for word in free.split() if word.isalpha())
        assert word not in text(llm, bad_words=[word]).replace(",", " ").split()

    @pytest.mark.full
    def test_penalties_change_the_text(self, llm: LLM) -> None:
        free = text(llm, max_tokens=60)
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
            assert text(llm, max_tokens=60, **{name: 2.0}) != free

    def test_min_tokens_delays_stop_strings(self, llm: LLM) -> None:
        free = text(llm, max_tokens=40)
        stop = free.split()[1]
        early = ask(llm, max_tokens=40, stop=[stop]).outputs[0]
        late = ask(llm, max_tokens=40, stop=[stop], min_tokens=20).outputs[0]
        assert (early.finish_reason, early.stop_reason) == ("stop", stop)
        assert len(early.token_ids) < 20 < len(late.token_ids)
        assert free.startswith(late.text)

    def test_an_answer_has_its_events_if_they_are_wanted(self, llm: LLM) -> None:
        assert ask(llm, max_tokens=2).outputs[0].timeline is None
        events = ask(llm, max_tokens=2, return_timeline=True).outputs[0].timeline
        assert [each.event for each in events] == ["queued", "scheduled", "first_token", "ended"]
        assert (events[-1].reason, events[-1].tokens) == ("length", 2)

    def test_repetition_ends_an_answer(self, llm: LLM) -> None:
        found = RepetitionDetection(max_pattern_size=3, min_count=5)
        answer = ask(llm, logit_bias={65: 100.0}, repetition_detection=found, max_tokens=100).outputs[0]
        assert (answer.finish_reason, len(answer.token_ids)) == ("repetition", 5)

    def test_answers_of_one_seed_differ_and_are_reproducible(self, llm: LLM) -> None:
        fields = {"n": 4, "seed": 7, "temperature": 1.0, "prompt": "The"}
        first, again = ask(llm, **fields), ask(llm, **fields)
        assert [o.text for o in first.outputs] == [o.text for o in again.outputs]
        assert len({o.text for o in first.outputs}) > 1
        alone = ask(llm, **{**fields, "n": 1}).outputs[0]
        assert alone.text == first.outputs[0].text


class TestStructured:
    SCHEMA = {  # noqa: RUF012
        "type": "object",
        "properties": {"b": {"type": "integer", "maximum": 99}, "a": {"type": "boolean"}},
        "required": ["b", "a"],
        "additionalProperties": False,
    }

    def test_a_schema(self, llm: LLM) -> None:
        for options in ({"temperature": 0.0}, {"temperature": 2.0, "seed": 3}):
            answer = ask(llm, max_tokens=100, structured_outputs=StructuredOutputs(json=self.SCHEMA), **options)
            found = json.loads(answer.outputs[0].text)
            assert list(found) == ["b", "a"]
            assert answer.outputs[0].finish_reason == "stop"

    def test_choices_and_expressions(self, llm: LLM) -> None:
        assert text(llm, structured_outputs=StructuredOutputs(choice=["red", "green"])) in ("red", "green")
        assert len(text(llm, structured_outputs=StructuredOutputs(regex="[0-9]{3}"))) == 3

    def test_a_grammar_that_does_not_compile_is_refused(self, llm: LLM) -> None:
        with pytest.raises(InvalidRequest) as caught:
            ask(llm, structured_outputs=StructuredOutputs(regex="(a"))
        assert caught.value.code == "invalid_structured_outputs"
        assert text(llm)

    def test_a_grammar_and_bias_that_allow_no_token_fail_the_request(self, llm: LLM) -> None:
        stuck = SamplingParams(allowed_token_ids=[65], structured_outputs=StructuredOutputs(regex="[0-9]{3}"))
        failed, fine = llm.generate(["x", "x"], [stuck, SamplingParams(max_tokens=4, ignore_eos=True)])
        assert failed.outputs[0].finish_reason == "error"
        assert failed.outputs[0].error == "request_failed: no token is allowed by the request's constraints"
        assert len(fine.outputs[0].token_ids) == 4 and fine.outputs[0].error is None

    def test_a_users_marker_opens_no_thought_although_it_has_the_markers_tokens(self, llm: LLM) -> None:
        wanted = SamplingParams(structured_outputs=StructuredOutputs(choice=["red", "green"]), max_tokens=20)
        said = [{"role": "user", "content": "say </t> <t> now"}]
        with llm.session() as session:
            for answer in (*llm.chat(said, wanted), *(session.chat(said, wanted) for _ in range(2))):
                assert answer.outputs[0].text in ("red", "green")
        start = llm.config.thinking_start_token_ids
        ids = list(llm.chat(said, wanted)[0].prompt_token_ids)
        assert any(ids[at : at + len(start)] == start for at in range(len(ids)))
        budget = SamplingParams(thinking_token_budget=0, max_tokens=2, temperature=0.0)
        free = SamplingParams(max_tokens=2, temperature=0.0)
        assert llm.chat(said, budget)[0].outputs[0].text == llm.chat(said, free)[0].outputs[0].text

    def test_end_of_thinking_is_forced_and_the_grammar_starts_after_it(self, llm: LLM) -> None:
        wanted = StructuredOutputs(choice=["red", "green"])
        # The demo model does not think; a bias makes its end of text unlikely, so that it does not end at once.
        options = {"thinking_token_budget": 5, "logit_bias": {0: -100.0}, "max_tokens": 40}
        answer = ask(llm, "<t>", structured_outputs=wanted, **options).outputs[0]
        thought, _, rest = answer.text.partition("</t>")
        assert rest in ("red", "green")
        assert thought


class TestLogprobs:
    def test_prompt_logprobs(self, llm: LLM) -> None:
        output = ask(llm, prompt_logprobs=2, logprobs=1, max_tokens=3)
        entries = output.prompt_logprobs
        assert len(entries) == len(output.prompt_token_ids)
        assert entries[0] is None
        for token, entry in zip(output.prompt_token_ids[1:], entries[1:], strict=True):
            assert 2 <= len(entry) <= 3
            assert entry[token].rank >= 1
            best = sorted(entry.values(), key=lambda logprob: logprob.rank)
            assert [logprob.logprob for logprob in best] == sorted((v.logprob for v in best), reverse=True)
        assert ask(llm, max_tokens=1).prompt_logprobs is None

    def test_a_prompt_that_fills_the_context_is_scored(self, llm: LLM) -> None:
        ids = [40 + i % 60 for i in range(512)]
        output = ask(llm, ids, prompt_logprobs=1, max_tokens=20, n=2)
        assert len(output.prompt_logprobs) == 512 and [len(each.token_ids) for each in output.outputs] == [1, 1]
        with pytest.raises(InvalidRequest, match="your prompt has 512 tokens, and at most 511 leave room"):
            ask(llm, ids)

    def test_prompt_logprobs_equal_output_logprobs(self, llm: LLM) -> None:
        """A greedy answer sent as a prompt has the same log probabilities, with and without chunked prefill."""
        answer = ask(llm, logprobs=0, max_tokens=30)
        own = [
            entry[token].logprob
            for token, entry in zip(answer.outputs[0].token_ids, answer.outputs[0].logprobs, strict=True)
        ]
        ids = answer.prompt_token_ids + answer.outputs[0].token_ids
        for n in (1, 2):
            entries = ask(llm, ids, prompt_logprobs=0, max_tokens=1, n=n, temperature=float(n > 1)).prompt_logprobs
            again = [entry[token].logprob for token, entry in zip(ids[1:], entries[1:], strict=True)][-len(own) :]
            np.testing.assert_allclose(again, own, atol=2e-2)


def test_draft_tokens_were_used(llm: LLM) -> None:
    text(llm, prompt="one two three one two three one two three one", max_tokens=60)
    statistics = llm.statistics()
    assert statistics.num_draft_tokens > 0
    assert statistics.num_free_blocks == statistics.num_usable_blocks


class TestPlugins:
    def test_a_plugin_runs_in_the_worker(self, llm: LLM) -> None:
        assert ask(llm, extra_args={"only": 70}, max_tokens=5).outputs[0].token_ids == [70] * 5

    def test_a_plugin_refuses_its_own_parameters(self, llm: LLM) -> None:
        with pytest.raises(InvalidRequest, match="only must be a token id"):
            ask(llm, extra_args={"only": "x"})

    @pytest.mark.full
    def test_a_plugin_that_cannot_be_loaded_fails_the_start(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('no licence')\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(ConfigError, match=r"broken_plugin:Any.*no licence"):
            LLM(logits_processors=["broken_plugin:Any"])
