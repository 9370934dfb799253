"""A simulated worker process, started by the supervisor: ``python -P -m quire.replay.simulate.worker_process``.

It implements the worker's protocol, takes the time of a cost model for each step, and returns pseudorandom tokens. One
process simulates all ranks of a worker group.
"""

import logging
import os
import signal
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError, EngineError
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.process.child import Report, child_parser, init_child
from quire.protocol.process.log import event_logger
from quire.protocol.wire.adapter_messages import LoadAdapter
from quire.protocol.wire.channel import Channel
from quire.protocol.wire.item_messages import Encode
from quire.protocol.wire.link_messages import Heartbeat
from quire.protocol.wire.transfer_messages import HostPages, MoveBlocks
from quire.protocol.wire.worker_handshake import Superseded, WorkerCommands, request_configuration, wait_for_message
from quire.protocol.wire.worker_messages import (
    Fault,
    MemoryPlan,
    ModelRunnerOutput,
    Ready,
    SampleInputs,
    SchedulerOutput,
    Shutdown,
)
from quire.replay.costs.copies import NO_TIERS, CopyClock, Tiers, copy_rates, page_bytes
from quire.replay.costs.cost import CostModel
from quire.replay.costs.side_clock import SideClock
from quire.replay.costs.sizes import simulated_slots
from quire.replay.simulate.simulated_runner import SimulatedRunner, SimulatedStep

log = event_logger("worker")

SPIN_SECONDS = 0.0002
"""How long before its deadline a sleep ends: about the delay of a sleep on a busy machine."""
POLL_SECONDS = 0.001
"""Resolution of a poll's timeout."""
ENOUGH_BLOCKS = 65_536
"""Maximum number of KV blocks if the cost model does not know the machine's memory."""
MAX_BLOCKS = 2**20
"""Maximum number of KV blocks if it does: a large machine would hold tens of millions of a tiny model's blocks, each a
Python object."""


class LoopClock(Protocol):
    """The clock of the loop, in monotonic seconds; replaced in tests."""

    def now(self) -> float: ...

    def sleep_until(self, when: float) -> None: ...


class RealClock:
    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, when: float) -> None:
        """Sleep until ``when`` with an error of a few microseconds: sleep, then spin."""
        rest = when - time.monotonic()
        if rest > SPIN_SECONDS:
            time.sleep(rest - SPIN_SECONDS)
        # Spinning costs CPU of this process, which has none to spend otherwise: a sleep of the system is late by more
        # than a decode step of a fast device takes.
        while time.monotonic() < when:
            pass


@dataclass(slots=True)
class _StepInFlight:
    """A step on the simulated device. ``result`` is None while the step awaits its sample inputs."""

    launched: SimulatedStep
    begin: float
    end: float
    result: ModelRunnerOutput | None


class SimulatedWorker:
    """Owns the channel to the scheduler, the rows, and the time at which the simulated device is free.

    Steps queue as on a device: a step that arrives while another is computed begins when that one ends. Copies of KV
    blocks, loads of adapters and encodings of items run beside them.
    """

    def __init__(
        self,
        channel: Channel,
        cost: CostModel,
        clock: LoopClock,
        pid: int,
        calls: WorkerCommands,
        num_ranks: int = 1,
    ) -> None:
        """``num_ranks`` is the number of simulated ranks."""
        self._channel = channel
        self._calls = calls
        self._cost = cost
        self._num_ranks = num_ranks
        self._clock = clock
        self._pid = pid
        self._in_flight: deque[_StepInFlight] = deque()
        self._free_at = 0.0
        self._copies = CopyClock(NO_TIERS)
        self._side = SideClock()

    def run(self) -> None:
        """Run until the scheduler sends Shutdown or another call arrives.

        Raises:
            ConfigError, EngineError, ProtocolError: also sent to the scheduler as a Fault.
        """
        try:
            configure = request_configuration(self._channel, 0, self._pid, self._calls)
            plan = plan_pool(configure.config, configure.kv_layout, self._cost, self._num_ranks)
            log.warning(
                "simulated worker: tokens are random", cost=self._cost.describe(), num_blocks=plan.num_blocks - 1
            )
            num_blocks = configure.num_blocks or plan.num_blocks
            # One process simulates all ranks, so its pages have the parts of all.
            size = page_bytes(configure.kv_layout, self._num_ranks) * self._num_ranks
            pools = [num_blocks] * len(configure.kv_layout.groups)
            self._channel.send(Ready(pools, plan, {}, size, num_slots=configure.num_slots or plan.num_slots))
            self._steps(SimulatedRunner(configure.config))
        except Superseded:
            return
        except Exception as error:
            kind = "checkpoint" if isinstance(error, ConfigError) else "error"
            self._channel.send(Fault(kind, " ".join(str(error).split()) or type(error).__name__))
            raise

    def _steps(self, runner: SimulatedRunner) -> None:
        while True:
            timeout = self._poll_timeout()
            if timeout is None:
                received = wait_for_message(self._channel, self._calls)
            else:
                received = self._channel.receive(timeout)
            match received.message if received else None:
                case SchedulerOutput() as step:
                    self._begin(runner, step)
                case SampleInputs() as inputs:
                    self._take_inputs(runner, inputs)
                case HostPages() as pages:
                    size = pages.page_bytes // self._num_ranks
                    self._copies = CopyClock(Tiers(pages.num_pages, size, copy_rates(self._cost)))
                case MoveBlocks() as move:
                    self._copies.send(move, self._clock.now(), self._free_at)
                case LoadAdapter() | Encode() as work:
                    self._side.send(work, self._clock.now())
                case Shutdown():
                    return
                case None if timeout is not None:
                    self._send_next()
                case Heartbeat() | None:
                    pass
                case other:
                    raise EngineError(f"unexpected {type(other).__name__} instead of a step")

    @property
    def _next_end(self) -> float:
        """When the oldest step, copy, load of an adapter or encoding ends; infinite if none has an end yet."""
        oldest = self._in_flight[0] if self._in_flight else None
        step_end = float("inf") if oldest is None or oldest.result is None else oldest.end
        return min(step_end, self._copies.next_end, self._side.next_end)

    def _poll_timeout(self) -> float | None:
        """Return how long to wait for a message, in seconds; None: without a limit.

        Messages that arrived while a step was computed are received before its result is sent, because they found the
        device busy.
        """
        end = self._next_end
        return None if end == float("inf") else max(0.0, end - self._clock.now() - POLL_SECONDS)

    def _begin(self, runner: SimulatedRunner, step: SchedulerOutput) -> None:
        if self._in_flight and self._in_flight[-1].result is None:  # a step of an earlier worker epoch
            waiting = self._in_flight[-1]
            waiting.result = ModelRunnerOutput(waiting.launched.step)
        launched = runner.launch(step)
        # With a step before it, the device takes the next one when that has ended, even if this process only reads the
        # message later.
        begin = self._free_at if self._in_flight else max(self._clock.now(), self._free_at)
        seconds = self._cost.seconds(launched.shape)
        self._free_at = begin + seconds
        result = None if launched.awaits_sample_inputs else runner.finish(launched, None, seconds)
        self._in_flight.append(_StepInFlight(launched, begin, self._free_at, result))

    def _take_inputs(self, runner: SimulatedRunner, inputs: SampleInputs) -> None:
        """Finish the step that awaits ``inputs``: its tokens are ready when it is computed, or now if that is later."""
        waiting = self._in_flight[-1] if self._in_flight else None
        if waiting is None or waiting.result is not None or waiting.launched.step != inputs.step:
            return  # inputs of a step of an earlier worker epoch
        self._free_at = waiting.end = max(waiting.end, self._clock.now())
        waiting.result = runner.finish(waiting.launched, inputs, waiting.end - waiting.begin)

    def _send_next(self) -> None:
        """Send what has ended, or sleep until something ends, so that messages are polled again."""
        now, end = self._clock.now(), self._next_end
        if end - now > 2 * POLL_SECONDS:
            return  # the poll returned early
        if end > now:
            self._clock.sleep_until(end)
        elif (ended := self._copies.take(now) or self._side.take(now)) is not None:
            self._channel.send(ended)
        else:
            result = self._in_flight.popleft().result
            assert result is not None
            self._channel.send(result)


def plan_pool(config: EngineConfig, layout: KVLayout, cost: CostModel, num_ranks: int) -> MemoryPlan:
    """Return the pool of the simulated machine: set by flag, derived from its memory, or enough for a full batch.

    Raises:
        ConfigError: not even one block fits.
    """
    if not layout.groups:
        return MemoryPlan("simulated", 0, 0, 0, 0, 0, config.block_size)
    per_rank = layout.rank_block_bytes(num_ranks)
    per_request = -(-config.max_model_len // config.block_size)
    if config.num_blocks_override:
        num_blocks = config.num_blocks_override + 1
    elif config.kv_cache_memory_bytes:
        num_blocks = config.kv_cache_memory_bytes // per_rank
    elif cost.kv_bytes:
        num_blocks = min(cost.kv_bytes // (per_rank * num_ranks), MAX_BLOCKS)
    else:
        num_blocks = max(min(config.max_num_seqs * per_request, ENOUGH_BLOCKS), len(layout.groups) * per_request) + 1
    if num_blocks < 2:
        raise ConfigError(
            f"not enough memory for one KV block of {layout.block_bytes} bytes: "
            f"raise --kv-cache-memory-bytes or set --num-gpu-blocks-override"
        )
    kv_cache = num_blocks * layout.block_bytes
    num_slots = simulated_slots(config, layout, kv_cache)
    return MemoryPlan("simulated", kv_cache, 0, 0, kv_cache, num_blocks, config.block_size, num_slots=num_slots)


def main() -> None:
    parser = child_parser(__doc__)
    parser.add_argument("--cost", metavar="COST", required=True, help="cost model, as in quire replay --cost")
    parser.add_argument("--ranks", metavar="N", type=int, required=True, help="number of simulated ranks")
    parser.add_argument("--quiet", action="store_true", help="log errors only")
    args = parser.parse_args()
    child = init_child(args.status_fd, args.lifeline_fd, args.directory, death_signal=signal.SIGKILL)

    if args.quiet:
        logging.getLogger("quire").setLevel(logging.ERROR)
    try:
        import msgspec
        import zmq

        from quire.protocol.wire.channel import Link
        from quire.protocol.wire.worker_messages import SchedulerToWorker
        from quire.protocol.wire.zmq_channel import ZmqChannel, check_socket_directory, worker_address
        from quire.replay.costs.parse import parse_cost

        check_socket_directory(args.directory)
        child.report(Report("started"))
        config = msgspec.msgpack.decode((args.directory / "config").read_bytes(), type=EngineConfig)
        cost = parse_cost(args.cost, tensor_parallel_size=args.ranks, model=config.model)
        context = zmq.Context()
        calls = WorkerCommands(child)
        while (call := calls.take()) is not None:
            link = Link(SchedulerToWorker, call.worker_epoch)
            address = worker_address(args.directory, call.worker_epoch, call.rank)
            channel = ZmqChannel(context, zmq.PAIR, address, link, bind=False)
            channel.wake_on(calls.fileno())
            SimulatedWorker(channel, cost, RealClock(), os.getpid(), calls, args.ranks).run()
            channel.close()
        context.term()
    except Exception as error:
        child.fail(error)


if __name__ == "__main__":
    main()
