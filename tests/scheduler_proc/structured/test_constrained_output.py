"""Whole outputs of real models under grammars: they match under chunks, preemption and drafts."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from grammar_cases import DEMO, EOS, text_of, tokens_of
from inprocess import Answer, InProcessEngine
from json_schemas import PERSON, schemas, validates
from tiers import thinned

from quire.protocol.config import SpeculativeConfig
from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.protocol.wire.front_end_messages import EndReason
from quire.worker_proc.batch.input_batch import InputBatch

PROMPT = tokens_of("Tell me of a person, please, and of what they like.")
SCHEMAS = schemas(7)


@pytest.fixture(scope="module")
def random_model(checkpoint_factory: Callable[..., tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with random weights and the demo's vocabulary: it generates any allowed text."""
    folder = tmp_path_factory.mktemp("with_tokenizer") / "model"
    shutil.copytree(checkpoint_factory("llama", vocab_size=1024, eos_token_id=EOS)[0], folder)
    shutil.copy(DEMO / "tokenizer.json", folder)
    return folder


@dataclass
class Oracle:
    """Proposes the output of an earlier run, with wrong tokens from time to time."""

    batch: InputBatch
    texts: list[list[int]]
    wrong_every: int

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        drafts: dict[int, list[int]] = {}
        for row, count in wanted.items():
            known = self.batch.tokens.data[row, : int(self.batch.num_known[row])].tolist()
            follow = next((t[len(known) : len(known) + count] for t in self.texts if t[: len(known)] == known), [])
            drafts[row] = [t if (len(known) + i) % self.wrong_every else 7 for i, t in enumerate(follow)]
        return {row: own for row, own in drafts.items() if own}


def engine_of(folder: Path, **settings: Any) -> InProcessEngine:
    return InProcessEngine(folder, max_num_seqs=16, block_size=8, **settings)


def ask(engine: InProcessEngine, *, plain: int = 0, **sampling: Any) -> dict[str, Answer]:
    """Add one request per schema, and ``plain`` requests without one."""
    for index, schema in enumerate(SCHEMAS):
        wanted = StructuredOutputs(json=schema)
        own = {"temperature": 1.0, "seed": index, "max_tokens": 150, "structured_outputs": wanted} | sampling
        engine.add(f"s{index}", [*PROMPT, 100 + index], **own)
        if index < plain:
            engine.add(f"p{index}", [*PROMPT, 200 + index], temperature=1.0, seed=index, max_tokens=20)
    answers = engine.run()
    engine.close()
    return answers


def check_fits(answers: Mapping[str, Answer]) -> None:
    for index, schema in enumerate(SCHEMAS):
        answer = answers[f"s{index}"]
        text = text_of(answer.tokens)
        assert answer.ended is not None and answer.ended.reason == EndReason.STOPPED, text
        assert validates(json.loads(text), schema), f"{text} is not of {schema}"


def tokens(answers: Mapping[str, Answer]) -> dict[str, list[int]]:
    return {name: answer.tokens for name, answer in answers.items()}


@pytest.fixture(scope="module")
def undisturbed(random_model: Path) -> dict[str, Answer]:
    """Run without chunks, preemptions and drafts."""
    return ask(engine_of(random_model, deterministic=True), plain=6)


def test_outputs_of_a_random_model_match_their_schemas(undisturbed: dict[str, Answer]) -> None:
    check_fits(undisturbed)


@pytest.mark.parametrize("asynchronous", thinned([False, True], keep=1))
def test_chunks_preemption_and_other_requests_do_not_change_outputs(
    asynchronous: bool, random_model: Path, undisturbed: dict[str, Answer]
) -> None:
    settings = {"num_blocks_override": 26, "long_prefill_token_threshold": 7, "async_scheduling": asynchronous}
    engine = engine_of(random_model, deterministic=True, **settings)
    busy = ask(engine, plain=6)
    assert engine.statistics().num_preemptions > 0
    assert tokens(busy) == tokens(undisturbed)
    alone = engine_of(random_model, deterministic=True)
    for index in range(6):
        alone.add(f"p{index}", [*PROMPT, 200 + index], temperature=1.0, seed=index, max_tokens=20)
    assert tokens(alone.run()) == {name: own for name, own in tokens(undisturbed).items() if name.startswith("p")}
    alone.close()


@pytest.mark.parametrize(("wrong_every", "asynchronous"), thinned([(2, True), (5, False), (10**6, True)], keep=0))
def test_drafts_do_not_change_outputs(
    wrong_every: int, asynchronous: bool, random_model: Path, undisturbed: dict[str, Answer]
) -> None:
    speculative = SpeculativeConfig(method="ngram", adaptive=False)
    settings = {"num_speculative_tokens": 3, "speculative": speculative, "async_scheduling": asynchronous}
    engine = engine_of(random_model, deterministic=True, **settings)
    texts = [[*PROMPT, (100 if n[0] == "s" else 200) + int(n[1:]), *a.tokens] for n, a in undisturbed.items()]
    engine.runner._proposer = Oracle(engine.runner.batch, texts, wrong_every)
    assert tokens(ask(engine, plain=6)) == tokens(undisturbed)
    statistics = engine.statistics()
    assert 0 < statistics.num_accepted_tokens <= statistics.num_draft_tokens
    assert wrong_every > 100 or statistics.num_accepted_tokens < statistics.num_draft_tokens
    rejected = statistics.num_draft_tokens - statistics.num_accepted_tokens
    assert (0 < engine.grammars.num_invalid_drafts <= rejected) == (wrong_every < 100)


@pytest.mark.full
def test_other_kinds_of_constraints() -> None:
    engine = engine_of(DEMO)
    wanted: dict[str, tuple[dict[str, Any], str]] = {
        "regex": ({"regex": "[A-Z][a-z]{2,6} [0-9]{2}"}, "[A-Z][a-z]{2,6} [0-9]{2}"),
        "choice": ({"choice": ["yes", 'no "really"\n']}, 'yes|no "really"\n'),
        "lark": ({"grammar": 'start: N ("+" N){1,3}\nN: /[1-9][0-9]?/'}, r"[1-9]\d?(\+[1-9]\d?){1,3}"),
        "gbnf": ({"grammar": 'root ::= "<" [ab]{1,5} ">"'}, "<[ab]{1,5}>"),
    }
    for name, (fields, _) in wanted.items():
        own = StructuredOutputs(**fields)
        engine.add(name, PROMPT, temperature=1.0, seed=3, max_tokens=60, structured_outputs=own)
    answers = engine.run()
    engine.close()
    for name, (_, pattern) in wanted.items():
        assert re.fullmatch(pattern, text_of(answers[name].tokens)), name


@pytest.mark.full
def test_a_resubmission_continues_after_its_delivered_tokens() -> None:
    whole = engine_of(DEMO)
    whole.add("a", PROMPT, temperature=1.0, seed=5, max_tokens=80, structured_outputs=StructuredOutputs(json=PERSON))
    output = whole.run()["a"].tokens
    whole.close()
    again = engine_of(DEMO)
    again.add(
        "a",
        PROMPT,
        output[:9],
        temperature=1.0,
        seed=5,
        max_tokens=80,
        structured_outputs=StructuredOutputs(json=PERSON),
    )
    assert output[:9] + again.run()["a"].tokens == output
    again.close()


@pytest.mark.full
def test_delivered_tokens_that_violate_the_grammar_fail_the_request_alone(random_model: Path) -> None:
    """A resubmission with delivered tokens that its grammar does not allow."""
    engine = engine_of(random_model)
    digits = StructuredOutputs(regex="[0-9]{3}")
    engine.add("bad", PROMPT, tokens_of("ab"), max_tokens=20, structured_outputs=digits)
    engine.add("good", PROMPT, tokens_of("1"), max_tokens=20, structured_outputs=digits)
    answers = engine.run()
    engine.close()
    ended = answers["bad"].ended
    assert ended is not None and ended.reason == EndReason.ERROR
    assert ended.detail == "request_failed: a sampled token is not allowed by its grammar"
    assert re.fullmatch("[0-9]{2}", text_of(answers["good"].tokens))


class TestThinking:
    START, END = tokens_of("<")[0], tokens_of(">")[0]

    def run(self, prompt: list[int], **sampling: Any) -> list[int]:
        markers = {"thinking_start_token_ids": [self.START], "thinking_end_token_ids": [self.END]}
        engine = engine_of(DEMO, **markers)
        wanted = StructuredOutputs(regex="[0-9]{4}")
        engine.add("a", prompt, temperature=1.0, seed=2, structured_outputs=wanted, **({"max_tokens": 400} | sampling))
        output = engine.run()["a"].tokens
        engine.close()
        return output

    @pytest.mark.full
    def test_thinking_opened_by_the_prompt_is_unconstrained(self) -> None:
        would_end = dict.fromkeys(EOS, 100.0)  # the end of text is not allowed before the grammar starts
        output = self.run([*PROMPT, self.START], thinking_token_budget=12, logit_bias=would_end)
        at = output.index(self.END)
        assert 0 < at <= 13 and re.fullmatch("[0-9]{4}", text_of(output[at + 1 :]))

    @pytest.mark.full
    def test_a_thinking_budget_delays_the_grammar(self) -> None:
        output = self.run(PROMPT, thinking_token_budget=3, logit_bias={self.START: 100.0}, max_tokens=30)
        at = output.index(self.END)
        assert output[0] == self.START and re.fullmatch("[0-9]{4}", text_of(output[at + 1 :]))

    @pytest.mark.parametrize("closed", thinned([False, True], keep=0))
    def test_without_thinking_the_grammar_holds_from_the_first_token(self, closed: bool) -> None:
        prompt = [*PROMPT, self.START, self.END] if closed else PROMPT
        budget = {"thinking_token_budget": 5} if closed else {}
        assert re.fullmatch("[0-9]{4}", text_of(self.run(prompt, **budget)))
