"""The scheduler's loop with several front ends, invalid results and dying workers."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from loop_under_test import LoopUnderTest
from scheduler_driver import change, expected_tokens, make_config, make_request
from tiers import thinned

from quire.protocol.config import FIRST_WORKER_EPOCH
from quire.protocol.errors import ConfigError
from quire.protocol.process.child import Child
from quire.protocol.wire.front_end_messages import Control, EndReason, Statistics, StepOutputs, Stop
from quire.protocol.wire.link_messages import Refused, Welcome
from quire.protocol.wire.worker_messages import ModelRunnerOutput
from quire.protocol.wire.zmq_channel import ZmqChannel
from quire.scheduler_proc.process.loop import SchedulerLoop
from quire.scheduler_proc.process.sockets import Sockets

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


def generate(loop: LoopUnderTest, client: ZmqChannel, n: int) -> tuple[list[int], list[int]]:
    """Request ``n`` tokens under an id that other clients use too. Returns the tokens and all finish reasons."""
    client.send(make_request("same", PROMPT, max_tokens=n, ignore_eos=True))
    tokens: list[int] = []
    ended: list[int] = []

    def is_done(message: Any) -> bool:
        if isinstance(message, StepOutputs):
            tokens.extend([] if message.tokens is None else message.tokens.tolist())
            ended.extend(end.reason for end in message.ended)
        return bool(ended)

    loop.until(is_done, client)
    return tokens, ended


def test_each_front_end_receives_only_its_own_outputs(loop: LoopUnderTest) -> None:
    clients = [loop.client, loop.another_client(), loop.another_client()]
    for client in clients[1:]:
        loop.until(lambda message: isinstance(message, Welcome), client)
    for client in clients:
        client.send(make_request("same", PROMPT, max_tokens=30, ignore_eos=True))
    for client in clients:
        ended: list[int] = []
        loop.until(
            lambda message, ended=ended: (
                isinstance(message, StepOutputs) and bool(ended.extend(message.ended) or ended)
            ),
            client,
        )
        assert [end.reason for end in ended] == [EndReason.LENGTH]


def test_a_new_front_end_never_takes_the_number_of_another(loop: LoopUnderTest) -> None:
    """Client numbers were once the number of front ends, so that a new one could get the number of a connected one."""
    first, second = loop.client, loop.another_client()
    loop.until(lambda message: isinstance(message, Welcome), second)
    second.send(make_request("same", PROMPT, max_tokens=100, ignore_eos=True))
    first.send(Welcome(1, ""))  # a message that front ends must not send: it is disconnected
    loop.until(lambda message: isinstance(message, Refused), first)
    third = loop.another_client()
    loop.until(lambda message: isinstance(message, Welcome), third)
    assert generate(loop, third, 3) == (expected_tokens(PROMPT, 3), [EndReason.LENGTH])
    second.send(Stop("same", 1))
    loop.until(lambda message: isinstance(message, StepOutputs) and bool(message.ended), second)


@pytest.mark.parametrize("fault", thinned(["token", "handle", "missing"], keep=1))
def test_an_invalid_result_loses_no_token(loop: LoopUnderTest, fault: str, caplog: pytest.LogCaptureFixture) -> None:
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
        assert generate(loop, loop.client, 12) == (expected_tokens(PROMPT, 12), [EndReason.LENGTH])
    assert not left[0] and "running requests will be recomputed by new workers" in caplog.text


@pytest.mark.full
def test_a_step_out_of_memory_halves_the_token_budget(loop: LoopUnderTest, caplog: pytest.LogCaptureFixture) -> None:
    left = [2]

    def spoil(result: ModelRunnerOutput) -> ModelRunnerOutput:
        if result.step < 4 or not left[0]:
            return result
        left[0] -= 1
        return ModelRunnerOutput(result.step, failure="out of memory in a step of 1 requests")

    loop.spoil = spoil
    with caplog.at_level(logging.ERROR):
        assert generate(loop, loop.client, 12) == (expected_tokens(PROMPT, 12), [EndReason.LENGTH])
    assert 'running requests will be recomputed reason="out of memory in a step of 1 requests"' in caplog.text
    assert "max_num_batched_tokens=" in caplog.text


def test_a_request_that_always_breaks_its_workers_fails_alone(loop: LoopUnderTest) -> None:
    """Every worker returns invalid results for it, until it has run alone and failed."""

    def spoil(result: ModelRunnerOutput) -> ModelRunnerOutput:
        rows = [row for row in loop.fake.rows.values() if row.request_id == "poison"]
        return change(result, tokens=np.array([-1], np.int32)) if rows else result

    loop.spoil = spoil
    loop.client.send(make_request("poison", PROMPT, max_tokens=9, ignore_eos=True))
    loop.client.send(make_request("good", PROMPT, max_tokens=9, ignore_eos=True))
    introduced: dict[int, str] = {}
    ended: dict[str, tuple[int, str]] = {}
    tokens: dict[str, list[int]] = {"good": [], "poison": []}

    def is_done(message: Any) -> bool:
        if isinstance(message, StepOutputs):
            introduced.update({i.handle: i.request_id for i in message.introduced})
            if message.handles is not None and message.tokens is not None:
                for handle, token in zip(message.handles.tolist(), message.tokens.tolist(), strict=True):
                    tokens[introduced[handle]].append(token)
            ended.update({introduced[end.handle]: (end.reason, end.detail) for end in message.ended})
        return len(ended) == 2

    loop.until(is_done)
    assert ended["good"] == (EndReason.LENGTH, "") and tokens["good"] == expected_tokens(PROMPT, 9)
    assert ended["poison"][0] == EndReason.ERROR and ended["poison"][1].startswith("engine_fault: ")
    assert loop.worker_epoch == 4, "three deaths"


def test_the_pool_has_the_block_size_of_the_workers(tmp_path: Path) -> None:
    """Their kernels read blocks of 4 tokens, larger than those of the configuration."""
    with zmq.Context() as context:
        loop = LoopUnderTest(context, tmp_path, make_config(block_size=3))
        loop.handshake()
        assert loop.configure.config.block_size == 3
        loop.renew_worker()
        loop.wait_for_report("ready")
        assert loop.configure.config.block_size == loop.configure.kv_layout.groups[0].block_size == 4
        loop.client.send(Control("statistics", 1))
        loop.until(lambda message: isinstance(message, Statistics) and message.block_size == 4)
        loop.stop()


def test_a_dying_worker_loses_no_token(loop: LoopUnderTest) -> None:
    loop.client.send(make_request("a", PROMPT, max_tokens=30, ignore_eos=True))
    tokens: list[int] = []

    def has_tokens(count: int) -> Any:
        def is_done(message: Any) -> bool:
            if isinstance(message, StepOutputs) and message.tokens is not None:
                tokens.extend(message.tokens.tolist())
            return len(tokens) >= count

        return is_done

    for count in (1, 7, 8, 29):
        loop.until(has_tokens(count))
        loop.renew_worker()
    loop.until(has_tokens(30))
    assert tokens == expected_tokens(PROMPT, 30)


@pytest.mark.full
def test_an_unsent_step_is_computed_by_the_next_worker(loop: LoopUnderTest) -> None:
    """Its socket is closed, without a report to the loop, which notices the failed send, or the overdue step."""
    tokens: list[int] = []

    def is_done(message: Any) -> bool:
        if isinstance(message, StepOutputs) and message.tokens is not None:
            tokens.extend(message.tokens.tolist())
        return len(tokens) == 5

    loop.client.send(make_request("before", PROMPT[::-1], max_tokens=5, ignore_eos=True))
    loop.until(is_done)  # then the usual duration of such steps is known
    loop.worker.close()
    loop.client.send(make_request("a", PROMPT, max_tokens=5, ignore_eos=True))
    loop.wait_for_report("group_failed", time_passes=True)
    loop.renew_worker()
    tokens.clear()
    loop.until(is_done)
    assert tokens == expected_tokens(PROMPT, 5)


def test_a_wrong_disk_folder_is_refused_before_workers_connect(tmp_path: Path) -> None:
    """A scheduler that replaces another one begins without it instead."""
    (tmp_path / "file").write_text("")
    config = make_config(ssd_cache_dir=str(tmp_path / "file"), ssd_cache_bytes=2**20)
    reports, status = os.pipe()
    child, transport = Child(status), Sockets(tmp_path, 1, 1)
    try:
        with pytest.raises(ConfigError, match=r"--ssd-cache-dir: .*/file must be a folder, not a link"):
            SchedulerLoop(config, transport, child)
        SchedulerLoop(config, transport, child, FIRST_WORKER_EPOCH + 1)
    finally:
        transport.close()
        child.close()
        os.close(reports)
        os.close(status)
