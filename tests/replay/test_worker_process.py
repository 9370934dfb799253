"""The simulated worker: the times of its results, and their acceptance by the real Scheduler."""

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from fake_child import no_calls
from memory_channel import memory_pair
from scheduler_driver import make_config, make_layout, make_request
from side_parts import parts_of

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError, EngineError
from quire.protocol.model.kv_layout import KVGroup, KVLayout
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.channel import Channel
from quire.protocol.wire.front_end_messages import AddRequest, Ended, StepOutputs
from quire.protocol.wire.item_messages import Encode, Encoded, InputItem
from quire.protocol.wire.link_messages import Heartbeat, Hello, Refused, Welcome
from quire.protocol.wire.side_rows import LOGPROBS, PROMPT_LOGPROBS
from quire.protocol.wire.transfer_messages import BlocksMoved, HostPages, MoveBlocks, MoveKind
from quire.protocol.wire.worker_messages import (
    Configure,
    Fault,
    ModelRunnerOutput,
    NewRequestData,
    Ready,
    SampleInputs,
    SchedulerOutput,
    SchedulerToWorker,
    Shutdown,
    WorkerToScheduler,
)
from quire.replay.costs.cost import ConstantCost
from quire.replay.run.step_shape import StepShape
from quire.replay.simulate.simulated_runner import SimulatedRunner
from quire.replay.simulate.worker_process import MAX_BLOCKS, SimulatedWorker, plan_pool
from quire.scheduler_proc.scheduler import Scheduler

CONFIG = make_config(eos=[7, 8], num_blocks_override=32)
WORDS = -(-CONFIG.model.vocab_size // 32)


@dataclass
class Script(Channel):
    """The worker's end of a channel, and its clock: messages arrive at the times in ``script``.

    Attributes:
        sent: (time, message) of the worker's messages.
    """

    script: list[tuple[float, Any]]
    sent: list[tuple[float, Any]] = field(default_factory=list)
    time: float = 0.0

    def __post_init__(self) -> None:
        self._far, self._near = memory_pair(WorkerToScheduler, SchedulerToWorker)

    def send(self, message: Any) -> Any:
        self._near.send(message)
        received = self._far.receive()
        assert received is not None
        self.sent.append((self.time, received.message))
        return []

    def receive(self, timeout: float | None = 0.0) -> Any:
        if timeout is not None and self.script[0][0] > self.time + timeout:
            self.time += timeout
            return None
        when, message = self.script.pop(0)
        self.time = max(self.time, when)
        self._far.send(message)
        return self._near.receive()

    def now(self) -> float:
        return self.time

    def sleep_until(self, when: float) -> None:
        self.time = max(self.time, when)


@dataclass
class PerToken:
    """A cost of one millisecond per token."""

    kv_bytes: int = 0

    def seconds(self, step: StepShape) -> float:
        return step.num_tokens / 1e3

    def describe(self) -> str:
        return "1 ms per token"


def run(*script: tuple[float, Any], config: EngineConfig = CONFIG) -> list[tuple[float, Any]]:
    """Run a worker until a Shutdown at 100 s; return its messages after Ready with their times."""
    script = Script(
        [(0.0, Welcome(1, "")), (0.0, Configure(1, make_layout(config), config)), *script, (100.0, Shutdown())]
    )
    with no_calls() as calls:
        SimulatedWorker(script, PerToken(), script, 1, calls).run()
    assert isinstance(script.sent[0][1], Hello) and isinstance(script.sent[1][1], Ready)
    return [(when, message) for when, message in script.sent[2:] if not isinstance(message, Heartbeat)]


def adding(step: int, handle: int, num_tokens: int, **extra: Any) -> SchedulerOutput:
    """Return a step that adds one request with all its prompt tokens."""
    sampling = {k: v for k, v in extra.items() if k in SamplingParams.__struct_fields__}
    new = NewRequestData(handle, f"r{handle}", num_tokens, num_tokens, 0, [1], SamplingParams(**sampling), handle)
    return SchedulerOutput(
        step,
        new_requests=[new],
        token_ids=np.arange(num_tokens, dtype=np.int32),
        block_ids=np.array([1], np.int32),
        counts=[(handle, num_tokens)] if num_tokens > 1 else [],
        awaits_sample_inputs=extra.get("awaits", False),
    )


def masks(step: int, handle: int, *allowed: int) -> SampleInputs:
    bits = np.zeros(WORDS * 32, np.uint8)
    bits[list(allowed)] = 1
    return SampleInputs(step, [handle], [1], np.packbits(bits, bitorder="little").view(np.int32))


class TestTimes:
    def test_step_takes_its_cost_and_the_next_one_follows(self) -> None:
        sent = run((1.0, adding(1, 0, 20)), (1.004, SchedulerOutput(2)), (1.0205, SchedulerOutput(3)))
        assert [round(when, 6) for when, _ in sent] == [1.02, 1.021, 1.022]
        assert [result.step for _, result in sent] == [1, 2, 3]
        assert [round(result.seconds, 6) for _, result in sent] == [0.02, 0.001, 0.001]

    def test_step_on_idle_device_begins_at_once(self) -> None:
        sent = run((1.0, adding(1, 0, 2)), (5.0, SchedulerOutput(2)))
        assert [round(when, 6) for when, _ in sent] == [1.002, 5.001]

    def test_step_waits_for_its_masks_and_the_next_one_for_both(self) -> None:
        step = adding(1, 0, 4, awaits=True)
        late = run((1.0, step), (1.5, masks(1, 0, 42)), (1.6, SchedulerOutput(2)))
        assert [round(when, 6) for when, _ in late] == [1.5, 1.601]
        assert late[0][1].tokens.tolist() == [42] and late[0][1].seconds == pytest.approx(0.5)
        early = run((1.0, step), (1.001, masks(1, 0, 42)))
        assert [round(when, 6) for when, _ in early] == [1.004]

    def test_step_without_masks_is_void(self) -> None:
        sent = run((1.0, adding(1, 0, 4, awaits=True)), (2.0, SchedulerOutput(2, removed=[0])), (2.0, masks(1, 0, 3)))
        assert [(result.step, result.tokens) for _, result in sent] == [(1, None), (2, None)]

    def test_shutdown_ends_worker_during_a_step(self) -> None:
        assert run((99.999, adding(1, 0, 50))) == []


def test_images_are_encoded_one_after_the_other_beside_the_steps() -> None:
    first, second, given = (
        Encode(InputItem(name, [(0, 1000)], "", kind))
        for name, kind in ((b"1", "image"), (b"2", "image"), (b"3", "rows"))
    )
    sent = run((1.0, first), (1.0, second), (1.0, given), (1.0, adding(1, 0, 20)))
    assert [(round(when, 3), type(message), getattr(message, "key", b"")[:1]) for when, message in sent] == [
        (1.02, ModelRunnerOutput, b""),
        (1.03, Encoded, b"1"),
        (1.06, Encoded, b"2"),
        (1.06, Encoded, b"3"),
    ]


class TestCopies:
    """Pages of as many bytes as are copied in a second, without the fixed part of 20 us."""

    MEMORY = HostPages("", 50, 25 * 10**9)

    def move(self, number: int, kind: MoveKind, count: int) -> MoveBlocks:
        ids = np.arange(1, count + 1, dtype=np.int32)
        return MoveBlocks(number, kind, ids, ids, ids.astype(np.int64), b"key " * count)

    def test_copies_are_answered_beside_steps(self) -> None:
        store, load = self.move(1, MoveKind.STORE, 1), self.move(2, MoveKind.LOAD, 2)
        sent = run(
            (0.0, self.MEMORY), (1.0, adding(1, 0, 20)), (1.001, store), (1.002, load), (5.0, SchedulerOutput(2))
        )
        assert [round(when, 3) for when, _ in sent] == [1.02, 2.02, 3.002, 5.001]
        assert [type(message).__name__ for _, message in sent] == [
            *("ModelRunnerOutput", "BlocksMoved", "BlocksMoved", "ModelRunnerOutput"),
        ]
        moved = [message for _, message in sent if isinstance(message, BlocksMoved)]
        assert [(m.transfer, m.failed, round(m.seconds, 3)) for m in moved] == [(1, [], 1.0), (2, [], 2.0)]

    def test_a_copy_ends_while_a_step_awaits_its_masks(self) -> None:
        step = adding(1, 0, 4, awaits=True)
        sent = run((0.0, self.MEMORY), (1.0, self.move(1, MoveKind.LOAD, 1)), (1.5, step), (2.5, masks(1, 0, 42)))
        assert [(round(when, 3), type(message).__name__) for when, message in sent] == [
            *((2.0, "BlocksMoved"), (2.5, "ModelRunnerOutput")),
        ]

    def test_a_page_has_the_parts_of_all_ranks(self) -> None:
        script = Script([(0.0, Configure(1, make_layout(CONFIG), CONFIG)), (0.0, Shutdown())])
        with no_calls() as calls:
            SimulatedWorker(script, PerToken(), script, 1, calls, 2).run()
        assert script.sent[1][1].page_bytes == 2 * 4096


class TestHandshake:
    def test_ready_contains_the_pool(self, caplog: pytest.LogCaptureFixture) -> None:
        script = Script([(0.0, Configure(1, make_layout(CONFIG), CONFIG)), (0.0, Shutdown())])
        with no_calls() as calls:
            SimulatedWorker(script, ConstantCost(2.5), script, 1, calls).run()
        ready = script.sent[1][1]
        assert (ready.num_blocks, ready.plan.device, ready.plan.block_size) == ([33], "simulated", 4)
        assert all(text in caplog.text for text in ("tokens are random", "2.5 ms", "num_blocks=32"))

    @pytest.mark.parametrize(
        ("message", "text"), [(Refused("no"), "refused this worker: no"), (Shutdown(), "Shutdown")]
    )
    def test_unexpected_message_is_a_fault(self, message: Any, text: str) -> None:
        script = Script([(0.0, message)])
        with pytest.raises(EngineError, match=text), no_calls() as calls:
            SimulatedWorker(script, PerToken(), script, 1, calls).run()
        fault = script.sent[-1][1]
        assert isinstance(fault, Fault) and text in fault.text


class TestPool:
    @pytest.mark.parametrize(
        ("cost_blocks", "flag_blocks", "num_blocks"),
        [(100, None, 100), (2**40, None, MAX_BLOCKS), (0, 50, 50), (0, None, 8 * 128 // 4 + 1)],
        ids=["memory of the cost model", "limited to MAX_BLOCKS", "kv_cache_memory_bytes", "full batch"],
    )
    def test_pool_size(self, cost_blocks: int, flag_blocks: int | None, num_blocks: int) -> None:
        block = make_layout(make_config()).block_bytes
        config = make_config(kv_cache_memory_bytes=flag_blocks and flag_blocks * block)
        assert plan_pool(config, make_layout(config), PerToken(cost_blocks * block), 1).num_blocks == num_blocks

    def test_kv_cache_bytes_are_per_rank(self) -> None:
        layout = make_layout(make_config())
        config = make_config(kv_cache_memory_bytes=layout.block_bytes * 50)
        halved = type(layout)(layout.groups, 2 * layout.num_kv_heads, layout.head_dim, layout.dtype)
        assert plan_pool(config, halved, PerToken(), 2).num_blocks == 50

    def test_each_group_is_divided_by_its_own_heads(self) -> None:
        """Over 4 ranks 8 heads become 2, and 1 head stays 1; a block is 16 tokens of the larger: 2 x 2 x 32 float32."""
        group = KVGroup("full_attention", 16, [0], num_kv_heads=8, head_dim=32)
        window = KVGroup("sliding_window", 16, [1], 8, num_kv_heads=1, head_dim=32)
        layout = KVLayout([group, window], num_kv_heads=8, head_dim=32, dtype="float32")
        assert layout.rank_block_bytes(4) == 2 * 16 * 2 * 32 * 4
        config = make_config(kv_cache_memory_bytes=40 * layout.rank_block_bytes(4))
        assert plan_pool(config, layout, PerToken(), 4).num_blocks == 40

    def test_rejects_too_little_memory(self) -> None:
        with pytest.raises(ConfigError, match="not enough memory for one KV block"):
            plan_pool(make_config(kv_cache_memory_bytes=10), make_layout(CONFIG), PerToken(), 1)


class TestTokens:
    def test_tokens_depend_on_seed_and_position_and_are_never_end_tokens(self) -> None:
        config = make_config(eos=[e for e in range(1000) if e % 10], thinking_start_token_ids=[10])
        first, again = SimulatedRunner(config), SimulatedRunner(config)
        one = [_tokens(first, adding(1, 0, 5)), *(_tokens(first, SchedulerOutput(s)) for s in range(2, 50))]
        two = [_tokens(again, adding(1, 0, 5)), *(_tokens(again, SchedulerOutput(s)) for s in range(2, 50))]
        assert one == two
        assert {token % 10 for [token] in one} == {0} and len({token for [token] in one}) > 20
        assert [10] not in one
        other = SimulatedRunner(config)
        assert [_tokens(other, adding(1, 3, 5)), *(_tokens(other, SchedulerOutput(s)) for s in range(2, 50))] != one

    def test_resubmitted_request_continues_with_the_same_tokens(self) -> None:
        runner = SimulatedRunner(CONFIG)
        script = [_tokens(runner, adding(1, 4, 5)), *(_tokens(runner, SchedulerOutput(s)) for s in (2, 3))]
        again = SimulatedRunner(CONFIG)
        assert _tokens(again, adding(1, 4, 7)) == script[2]

    def test_samples_only_allowed_tokens(self) -> None:
        runner = SimulatedRunner(CONFIG)
        script = [_tokens(runner, adding(1, 0, 5, allowed_token_ids=[3, 5])), _tokens(runner, SchedulerOutput(2))]
        assert {token for [token] in script} <= {3, 5}

    def test_respects_mask_and_ends_as_soon_as_allowed(self) -> None:
        assert _masked(20, 21, 22) in (20, 21, 22)
        assert _masked(20, 21, 7) == 7
        assert _masked(20, 7, min_tokens=1, max_tokens=2) == 20
        assert _masked(20, 21, 22, allowed_token_ids=[21]) == 21

    def test_request_without_allowed_token_fails(self) -> None:
        runner = SimulatedRunner(CONFIG)
        launched = runner.launch(adding(1, 0, 5, awaits=True))
        result = runner.finish(launched, masks(1, 0), 0.0)
        assert result.failed == [(0, "no token is allowed")] and result.tokens is not None


def _tokens(runner: SimulatedRunner, diff: SchedulerOutput) -> list[int]:
    tokens = runner.finish(runner.launch(diff), None, 0.0).tokens
    assert tokens is not None
    return [int(token) for token in tokens]


def _masked(*allowed: int, **sampling: Any) -> int:
    runner = SimulatedRunner(CONFIG)
    result = runner.finish(runner.launch(adding(1, 0, 5, awaits=True, **sampling)), masks(1, 0, *allowed), 0.0)
    assert result.tokens is not None and not result.failed
    return int(result.tokens[0])


class Engine:
    """The real Scheduler with a SimulatedRunner and two steps in flight; checks the Scheduler after each result."""

    def __init__(self, **settings: Any) -> None:
        self.config = make_config(async_scheduling=True, **settings)
        self.scheduler = Scheduler(self.config, make_layout(self.config), 25)
        self.runner = SimulatedRunner(self.config)
        self.flying: deque[ModelRunnerOutput] = deque()
        self.ended: list[Ended] = []
        self.prompts: dict[int, list[int]] = {}
        self.num_logprobs = 0

    def turn(self) -> bool:
        """Schedule while the pipeline has room, then consume one result; return False if idle."""
        while self.scheduler.can_schedule and (diff := self.scheduler.schedule(0.0)) is not None:
            self.flying.append(self.runner.finish(self.runner.launch(diff), None, 0.001))
        if not self.flying:
            return False
        result = self.flying.popleft()
        self.num_logprobs += len(parts_of(result, LOGPROBS))
        self.scheduler.consume(result)
        self.scheduler.check()
        for _, message in self.scheduler.take_messages():
            assert isinstance(message, StepOutputs)
            self.ended += message.ended
            for handle, start, rows in parts_of(message, PROMPT_LOGPROBS):
                self.prompts.setdefault(handle, []).extend(range(start, start + len(rows[0])))
        return True


def test_scheduler_accepts_every_result_of_an_overloaded_run() -> None:
    """A wrong row, order or position raises a WorkerFault; there are preemptions, chunks, endings and late arrivals."""
    rng, engine = random.Random(5), Engine()
    waiting: deque[AddRequest] = deque()
    for index in range(60):
        prompt = [rng.randrange(1000) for _ in range(rng.randrange(1, 40))]
        wishes: dict[str, Any] = {"max_tokens": rng.randrange(1, 30), "ignore_eos": True}
        if index % 3 == 0:
            wishes["logprobs"] = rng.randrange(0, 4)
        waiting.append(make_request(f"r{index}", prompt, seed=index, **wishes))
    busy = True
    while waiting or busy:
        if waiting and rng.random() < 0.5:
            engine.scheduler.consume(waiting.popleft())
        busy = engine.turn()
    assert len(engine.ended) == 60 and engine.num_logprobs > 100
    assert engine.scheduler.statistics(0).num_preemptions > 0


def test_prompt_logprobs_are_sent_once_per_token() -> None:
    engine = Engine(max_num_batched_tokens=16)
    engine.scheduler.consume(make_request("r", list(range(50)), max_tokens=3, prompt_logprobs=2))
    while engine.turn():
        pass
    assert list(engine.prompts.values()) == [list(range(1, 50))]


def test_logprobs_decrease_and_begin_with_the_token() -> None:
    runner = SimulatedRunner(CONFIG)
    result = runner.finish(runner.launch(adding(1, 0, 5, logprobs=3)), None, 0.0)
    assert result.tokens is not None
    ((_, _, (ids, ranks, values)),) = parts_of(result, LOGPROBS)
    assert ids.shape == (1, 4) and ids[0, 0] == ids[0, 1] == result.tokens[0] and len(set(ids[0].tolist())) == 3
    assert values[0].tolist() == pytest.approx([np.log(0.5) * n for n in (1, 1, 2, 3)])
    assert ranks.tolist() == [[1]]
