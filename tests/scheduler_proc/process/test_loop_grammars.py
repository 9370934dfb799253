"""The scheduler's loop with grammars: requests wait for grammars, steps for masks, and masks for draft tokens."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from grammar_cases import DEMO, EOS, VOCAB_SIZE, tokens_of
from log_replay import replay
from loop_under_test import LoopUnderTest, no_drafts
from scheduler_driver import change, make_config, make_layout, make_request
from tiers import thinned

from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.protocol.wire.front_end_messages import Abort, EndReason, Rejected, StepOutputs
from quire.protocol.wire.worker_messages import Proposed, SampleInputs, SchedulerOutput
from quire.scheduler_proc.trace.event_log import TraceHeader

PROMPT = [3, 1, 4, 1, 5]
WORD = "structured"
ANSWER = [*tokens_of(WORD), EOS[1]]
MakeLoop = Callable[..., LoopUnderTest]


@pytest.fixture
def make_loop(tmp_path: Path) -> Iterator[MakeLoop]:
    made: list[LoopUnderTest] = []

    def make(**settings: Any) -> LoopUnderTest:
        model = {"model_path": str(DEMO), "vocab_size": VOCAB_SIZE, "eos": EOS}
        loop = LoopUnderTest(context, tmp_path, make_config(**({"async_scheduling": True} | model | settings)))
        made.append(loop)
        loop.handshake()
        return loop

    with zmq.Context() as context:
        yield make
        for loop in made:
            loop.stop()


def ask(loop: LoopUnderTest, request_id: str, **wanted: Any) -> None:
    """Send a request whose sampled tokens are those of WORD."""
    for index, token in enumerate(ANSWER):
        loop.fake.forced[request_id, index] = token
    sampling = {"structured_outputs": StructuredOutputs(**wanted)} if wanted else {}
    loop.client.send(make_request(request_id, PROMPT, max_tokens=20, **sampling))


def end_of(loop: LoopUnderTest, count: int = 1) -> tuple[list[int], list[Any]]:
    """Return the tokens and the first ``count`` endings, refusals included."""
    tokens: list[int] = []
    ended: list[Any] = []

    def is_done(message: Any) -> bool:
        if isinstance(message, StepOutputs):
            tokens.extend([] if message.tokens is None else message.tokens.tolist())
            ended.extend(message.ended)
        if isinstance(message, Rejected):
            ended.append(message)
        return len(ended) >= count

    loop.until(is_done)
    return tokens, ended


def allowed_by(inputs: SampleInputs | None) -> list[set[int]]:
    """Return the allowed tokens of each position of the single request."""
    assert inputs is not None and inputs.bitmask is not None
    rows = inputs.bitmask.reshape(sum(inputs.counts), -1).view(np.uint8)
    return [set(np.flatnonzero(np.unpackbits(row, bitorder="little")).tolist()) for row in rows]


def test_each_step_has_masks_for_its_position(make_loop: MakeLoop) -> None:
    """Also behind a request whose grammar is refused."""
    loop = make_loop()
    ask(loop, "bad", regex="[")
    _, (refused,) = end_of(loop)
    text = "the regular expression cannot be used: unclosed character class"
    assert refused == Rejected("bad", "invalid_structured_outputs", "structured_outputs", text)
    ask(loop, "a", choice=[WORD, "other"])
    tokens, ended = end_of(loop)
    assert tokens == ANSWER and ended[0].reason == EndReason.STOPPED
    for inputs, token in zip(loop.inputs, ANSWER, strict=False):
        assert token in allowed_by(inputs)[0]
    assert tokens_of("other")[0] in allowed_by(loop.inputs[0])[0]
    assert allowed_by(loop.inputs[len(ANSWER) - 1]) == [set(EOS)]


@pytest.mark.full
def test_requests_without_a_grammar_are_not_masked(make_loop: MakeLoop) -> None:
    loop = make_loop()
    ask(loop, "free")
    ask(loop, "a", choice=[WORD])
    end_of(loop, 2)
    assert loop.inputs and all(inputs is not None and len(inputs.handles) <= 1 for inputs in loop.inputs)


@pytest.mark.full
def test_an_abort_while_compiling_ends_the_request_and_frees_its_id(make_loop: MakeLoop) -> None:
    loop = make_loop()
    ask(loop, "a", regex="[0-9]+")
    loop.client.send(Abort(["a"]))
    ask(loop, "a", choice=[WORD])
    tokens, ended = end_of(loop, 2)
    assert [end.reason for end in ended] == [EndReason.ABORTED, EndReason.STOPPED] and tokens == ANSWER


@pytest.mark.full
def test_a_duplicate_id_is_refused_and_the_first_keeps_its_grammar(make_loop: MakeLoop) -> None:
    loop = make_loop()
    ask(loop, "a", choice=[WORD])
    ask(loop, "a", regex="[0-9]+")
    tokens, ended = end_of(loop, 2)
    assert ended[0].code == "duplicate_request_id" and ended[1].reason == EndReason.STOPPED and tokens == ANSWER


@pytest.mark.full
def test_a_disallowed_token_fails_the_request_alone(make_loop: MakeLoop) -> None:
    loop = make_loop()
    ask(loop, "a", regex="[0-9]+")
    _, (ended,) = end_of(loop)
    assert (ended.reason, ended.detail[:15]) == (EndReason.ERROR, "request_failed:")
    ask(loop, "b", choice=[WORD])
    assert end_of(loop)[0] == ANSWER


@pytest.mark.full
def test_the_grammar_continues_after_an_invalid_result(make_loop: MakeLoop) -> None:
    loop = make_loop()
    left = [2]

    def spoil(result: Any) -> Any:
        if result.step < 3 or not left[0] or result.tokens is None:
            return result
        left[0] -= 1
        return change(result, tokens=result.tokens + VOCAB_SIZE)

    loop.spoil = spoil
    ask(loop, "a", choice=[WORD])
    assert end_of(loop)[0] == ANSWER and not left[0]


@pytest.mark.full
def test_a_run_with_grammars_replays(make_loop: MakeLoop) -> None:
    loop = make_loop()
    ask(loop, "a", choice=[WORD])
    ask(loop, "bad", regex="[")
    ask(loop, "fails", regex="[0-9]+")
    ask(loop, "free")
    _, ended = end_of(loop, 4)
    assert sorted(str(getattr(end, "reason", "refused")) for end in ended) == ["1", "1", "4", "refused"]
    header = TraceHeader(loop.config, make_layout(loop.config), 33)
    assert replay(header, list(loop.log), check=True) is None


class TestDrafts:
    def proposing(self, make_loop: MakeLoop, propose: Callable[[SchedulerOutput, int], Proposed]) -> LoopUnderTest:
        """``propose``: called with the step and the number of output tokens."""
        loop = make_loop(num_speculative_tokens=2, async_scheduling=False, max_num_batched_tokens=64)

        def drafts(step: SchedulerOutput) -> Proposed:
            (row,) = loop.fake.rows.values()
            return propose(step, len(row.tokens) - row.num_prompt_tokens)

        loop.propose = drafts
        return loop

    @pytest.mark.full
    def test_drafts_have_one_mask_each_and_one_after_the_last(self, make_loop: MakeLoop) -> None:
        def propose(step: SchedulerOutput, known: int) -> Proposed:
            ((handle, most),) = step.drafts
            right = ANSWER[known : known + most]
            if not right:
                return no_drafts(step)
            return Proposed(
                step.step, np.array([handle], "i4"), np.array([len(right)], "i4"), np.array(right, np.int32)
            )

        loop = self.proposing(make_loop, propose)
        ask(loop, "a", choice=[WORD, "other"])
        tokens, _ = end_of(loop)
        assert tokens == ANSWER
        most = max((inputs for inputs in loop.inputs if inputs and inputs.counts), key=lambda inputs: inputs.counts[0])
        assert most.counts == [3] and len(allowed_by(most)) == 3

    @pytest.mark.full
    @pytest.mark.parametrize("damage", thinned(["handle", "too many", "token", "lengths"], keep=1))
    def test_invalid_drafts_lose_their_step(self, make_loop: MakeLoop, damage: str) -> None:
        left = [1]

        def propose(step: SchedulerOutput, known: int) -> Proposed:
            if not left[0]:
                return no_drafts(step)
            left[0] -= 1
            handle, count = np.array([step.drafts[0][0]], np.int32), np.array([1], np.int32)
            wrong = {
                "handle": Proposed(step.step, handle + 50, count, count),
                "too many": Proposed(step.step, handle, count + 3, np.zeros(4, np.int32)),
                "token": Proposed(step.step, handle, count, count + VOCAB_SIZE),
                "lengths": Proposed(step.step, handle, count, np.zeros(2, np.int32)),
            }
            return wrong[damage]

        loop = self.proposing(make_loop, propose)
        ask(loop, "a", choice=[WORD])
        assert end_of(loop)[0] == ANSWER and not left[0]
        assert loop.inputs.count(None) == 1

    @pytest.mark.full
    def test_drafts_of_another_step_are_ignored(self, make_loop: MakeLoop) -> None:
        def propose(step: SchedulerOutput, known: int) -> Proposed:
            loop.worker.send(Proposed(step.step - 1, *(np.array([9], np.int32),) * 3))
            return no_drafts(step)

        loop = self.proposing(make_loop, propose)
        ask(loop, "a", choice=[WORD])
        assert end_of(loop)[0] == ANSWER and None not in loop.inputs
