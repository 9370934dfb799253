"""The scheduler's loop: several front ends, and results that cannot be right."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from loop_under_test import LoopUnderTest
from scheduler_driver import change, expected_tokens, make_config, make_request

from quire.protocol.messages import EndReason, EngineState, ModelRunnerOutput, Refused, StepOutputs, Stop, Welcome
from quire.protocol.zmq_channel import ZmqChannel
from quire.scheduler_proc.loop import MAX_FAULTS_IN_A_ROW
from quire.scheduler_proc.scheduler import WorkerFault

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[LoopUnderTest]:
    with zmq.Context() as context:
        loop = LoopUnderTest(context, tmp_path, make_config(async_scheduling=True))
        loop.handshake()
        yield loop
        if loop.failure is None:
            loop.stop()
        else:
            loop.close()


def answer(loop: LoopUnderTest, client: ZmqChannel, n: int) -> tuple[list[int], list[int]]:
    """Ask for ``n`` tokens under an id that others use too; returns the tokens, and the reasons of all endings."""
    client.send(make_request("same", PROMPT, max_tokens=n, ignore_eos=True))
    tokens: list[int] = []
    ended: list[int] = []

    def heard(message: Any) -> bool:
        if isinstance(message, StepOutputs):
            tokens.extend([] if message.tokens is None else message.tokens.tolist())
            ended.extend(end.reason for end in message.ended)
        return bool(ended)

    loop.until(heard, client)
    return tokens, ended


def test_each_front_end_hears_of_its_own_requests_only(loop: LoopUnderTest) -> None:
    clients = [loop.client, loop.another_client(), loop.another_client()]
    for client in clients[1:]:
        loop.until(lambda heard: isinstance(heard, Welcome), client)
    for client in clients:
        client.send(make_request("same", PROMPT, max_tokens=30, ignore_eos=True))
    for client in clients:
        ended: list[int] = []
        loop.until(
            lambda heard, ended=ended: isinstance(heard, StepOutputs) and bool(ended.extend(heard.ended) or ended),
            client,
        )
        assert [end.reason for end in ended] == [EndReason.LENGTH]


def test_a_front_end_that_comes_after_another_went_is_nobody_else(loop: LoopUnderTest) -> None:
    """Numbers of front ends were once counted by how many there are, so a new one got the number of a living one."""
    first, second = loop.client, loop.another_client()
    loop.until(lambda heard: isinstance(heard, Welcome), second)
    second.send(make_request("same", PROMPT, max_tokens=100, ignore_eos=True))
    first.send(Welcome(1, ""))  # what no front end may say: it is cut off
    loop.until(lambda heard: isinstance(heard, Refused), first)
    third = loop.another_client()
    loop.until(lambda heard: isinstance(heard, Welcome), third)
    assert answer(loop, third, 3) == (expected_tokens(PROMPT, 3), [EndReason.LENGTH])
    second.send(Stop("same", 1))
    loop.until(lambda heard: isinstance(heard, StepOutputs) and bool(heard.ended), second)


@pytest.mark.parametrize("fault", ["token", "handle", "missing"])
def test_a_wrong_result_costs_steps_and_no_token(
    loop: LoopUnderTest, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    left = [2]

    def spoil(result: ModelRunnerOutput) -> ModelRunnerOutput:
        if result.step < 4 or not left[0] or result.tokens is None:
            return result
        left[0] -= 1
        if fault == "token":
            return change(result, tokens=result.tokens + 1000)
        if fault == "handle":
            return change(result, handles=np.array([77], np.int32))
        return change(result, tokens=None, handles=np.zeros(0, np.int32))

    loop.spoil = spoil
    with caplog.at_level(logging.ERROR):
        assert answer(loop, loop.client, 12) == (expected_tokens(PROMPT, 12), [EndReason.LENGTH])
    assert not left[0] and "what runs is computed again" in caplog.text


def test_a_step_too_large_for_the_worker_makes_steps_smaller(
    loop: LoopUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    left = [2]

    def spoil(result: ModelRunnerOutput) -> ModelRunnerOutput:
        if result.step < 4 or not left[0]:
            return result
        left[0] -= 1
        return ModelRunnerOutput(result.step, failure="out of memory in a step of 1 requests")

    loop.spoil = spoil
    with caplog.at_level(logging.ERROR):
        assert answer(loop, loop.client, 12) == (expected_tokens(PROMPT, 12), [EndReason.LENGTH])
    assert "out of memory in a step of 1 requests; what runs is computed again" in caplog.text
    assert "steps have at most" in caplog.text


def test_a_worker_that_is_never_right_ends_the_engine(loop: LoopUnderTest) -> None:
    loop.spoil = lambda result: change(result, tokens=np.array([-1], np.int32), handles=np.array([0], np.int32))
    loop.client.send(make_request("a", PROMPT, max_tokens=9))
    seen: list[Any] = []
    loop.until(lambda heard: bool(seen.append(heard)) or (isinstance(heard, EngineState) and heard.kind == "failed"))
    ended = [end for message in seen if isinstance(message, StepOutputs) for end in message.ended]
    assert [end.reason for end in ended] == [EndReason.ERROR]
    loop.join()
    assert isinstance(loop.failure, WorkerFault) and MAX_FAULTS_IN_A_ROW == 5
