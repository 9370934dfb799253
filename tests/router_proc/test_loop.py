"""The router process over real sockets: a front end, and engines that publish events and answer for statistics."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from fake_child import lone_child
from scheduler_driver import make_config

from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.process.child import Child, Command
from quire.protocol.process.router_figures import RouterFigures, read_router_figures
from quire.protocol.routing import EnginePlace, RoutingConfig
from quire.protocol.wire.channel import Link
from quire.protocol.wire.front_end_messages import (
    Control,
    FrontEndToScheduler,
    Histogram,
    Statistics,
    TenantService,
)
from quire.protocol.wire.kv_events import HASH_BYTES
from quire.protocol.wire.link_messages import PROTOCOL_VERSION, Hello, Message, Refused, Welcome
from quire.protocol.wire.router_messages import Route, Routed, RouterToFrontEnd
from quire.protocol.wire.zmq_channel import ZmqChannel, ZmqHub, frontend_address, kv_events_address, router_address
from quire.router_proc import loop
from quire.router_proc.loop import RouterLoop
from quire.router_proc.sockets import RouterSockets
from quire.scheduler_proc.kv.events import KVEventRecorder
from quire.scheduler_proc.process.kv_event_feeds import KVEventFeeds
from quire.scheduler_proc.process.kv_event_publisher import KVEventPublisher

CONFIG = msgspec.structs.replace(make_config(), feeds_router=True)
HASHES = [bytes([number]) * HASH_BYTES[CONFIG.prefix_caching_hash_algo] for number in range(4)]
KEYS = b"".join(each[:8] for each in HASHES)


class FakeEngine:
    """The sockets of a scheduler."""

    def __init__(self, context: "zmq.Context[Any]", root: Path, number: int, config: EngineConfig = CONFIG) -> None:
        directory = root / f"engine-{number}.1"
        directory.mkdir(mode=0o700)
        (directory / "config").write_bytes(msgspec.msgpack.encode(config))
        self.place = EnginePlace(number, str(directory), 1, "serving", config.block_size, 1, device=f"device {number}")
        publisher = KVEventPublisher(context, *kv_events_address(directory, 1), number)
        self.feeds = KVEventFeeds([publisher], number)
        layout = kv_layout(config.model, config.block_size, config.kv_cache_dtype)
        self.recorder: KVEventRecorder = self.feeds.record(layout, len(HASHES[0]))
        self.hub = ZmqHub(context, frontend_address(directory, 1), FrontEndToScheduler)
        self.statistics = Statistics(0, num_usable_blocks=100)
        self.received: list[Message] = []
        self.step_s = 0.01
        self.num_steps = 0

    def store(self, hashes: list[bytes]) -> None:
        self.recorder.stored(hashes, "device")

    def turn(self) -> None:
        self.feeds.publish(0.0)
        self.feeds.answer()
        while (received := self.hub.receive()) is not None:
            self.received.append(received.message)
            match received.message:
                case Hello():
                    self.hub.send(received.peer, Welcome(PROTOCOL_VERSION, "", 16))
                case Control(query=query):
                    self.num_steps += 2
                    tokens, worker = (Histogram([], [], each * self.num_steps) for each in (500.0, self.step_s))
                    steps = {"num_steps": self.num_steps, "step_tokens": tokens, "step_worker": worker}
                    self.hub.send(received.peer, msgspec.structs.replace(self.statistics, query=query, **steps))

    def close(self) -> None:
        self.feeds.close()
        self.hub.close()


class Case:
    """A router, whose clock the test advances, and a front end."""

    def __init__(self, context: "zmq.Context[Any]", root: Path, child: Child, config: RoutingConfig) -> None:
        self.now = 0.0
        self.root, self.context, self.child = root, context, child
        self.sockets = RouterSockets(root, 1)
        self.loop = RouterLoop(config, self.sockets, child, root, 1, clock=lambda: self.now)
        self.engines: list[FakeEngine] = []
        self.front_end = ZmqChannel(context, zmq.DEALER, router_address(root, 1), Link(RouterToFrontEnd), bind=False)
        self.front_end.send(Hello(PROTOCOL_VERSION, "frontend", 0, os.getpid()))
        assert self.receive() == Welcome(PROTOCOL_VERSION, "")

    def add(self, *engines: FakeEngine) -> None:
        self.engines += engines
        self.child.put(Command("engines", engines=[engine.place for engine in self.engines]))

    def until(self, is_done: Any) -> None:
        for _ in range(1000):
            self.loop.turn()
            for engine in self.engines:
                engine.turn()
            if is_done():
                return
            self.now += 0.25
            self.sockets.wait(5)
        raise AssertionError("it does not happen")

    def receive(self) -> Message:
        received: list[Message] = []

        def has_received() -> bool:
            if (found := self.front_end.receive()) is not None:
                received.append(found.message)
            return bool(received)

        self.until(has_received)
        return received[0]

    def ask(self, ticket: int, **fields: Any) -> Message:
        self.front_end.send(Route(ticket, 4 * CONFIG.block_size, KEYS, **fields))
        return self.receive()

    def figures(self) -> RouterFigures:
        return read_router_figures(self.root) or RouterFigures()

    def close(self) -> None:
        self.front_end.close()
        self.loop.close()
        self.sockets.close()
        for engine in self.engines:
            engine.close()


@pytest.fixture
def context() -> Iterator["zmq.Context[Any]"]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def case(context: "zmq.Context[Any]", tmp_path: Path) -> Iterator[Case]:
    with lone_child() as child:
        case = Case(context, tmp_path, child, RoutingConfig(num_tenants=2, trace=str(tmp_path / "trace.jsonl")))
        yield case
        case.close()


def test_routes_by_the_events_of_engines(case: Case) -> None:
    assert case.ask(1) == Routed(1, -1, "")
    case.add(*(FakeEngine(case.context, case.root, number) for number in range(2)))
    case.engines[1].store(HASHES[:3])
    case.until(lambda: case.figures().indexed_blocks == {0: 0, 1: 3})
    assert case.ask(2) == Routed(2, 1, "cached", 3 * CONFIG.block_size)
    case.engines[1].recorder.removed(HASHES[:3], "device")
    case.until(lambda: case.figures().indexed_blocks == {0: 0, 1: 0})
    case.child.put(Command("engines", engines=[case.engines[0].place]))
    assert case.ask(3) == Routed(3, 0, "only")
    found = case.figures()
    assert (1, "cached", 1) in found.choices
    assert found.num_unplaced == 1 and found.index_bytes > 0 and not found.not_indexed


def test_an_engine_that_lies_is_not_indexed_and_the_others_are(case: Case) -> None:
    case.add(*(FakeEngine(case.context, case.root, number) for number in range(2)))
    case.engines[0].store(HASHES[:2])
    case.engines[1].store([b"too short"])
    case.until(lambda: 1 in case.figures().not_indexed)
    assert case.figures().damaged[1] == 1 and case.figures().indexed_blocks == {0: 2}
    assert case.ask(1) == Routed(1, 0, "cached", 2 * CONFIG.block_size)


def test_an_engine_on_a_slower_device_gets_fewer_requests(case: Case) -> None:
    case.add(*(FakeEngine(case.context, case.root, number) for number in range(2)))
    case.engines[0].step_s = 0.4
    case.until(lambda: case.engines[0].num_steps > 40)
    for ticket in range(2):
        case.front_end.send(Route(ticket, 4 * CONFIG.block_size))
        assert case.receive() == Routed(ticket, 1, "load")


def test_shares_the_service_of_tenants(case: Case) -> None:
    case.add(*(FakeEngine(case.context, case.root, number) for number in range(2)))
    case.until(lambda: all(any(isinstance(each, Control) for each in e.received) for e in case.engines))
    case.engines[0].statistics = Statistics(
        0,
        num_usable_blocks=100,
        tenant_service=[(1, 70), (2, 5)],
    )
    case.until(lambda: any(isinstance(each, TenantService) for each in case.engines[1].received))
    [service] = [each for each in case.engines[1].received if isinstance(each, TenantService)]
    assert service == TenantService([(1, 70), (2, 5)])
    assert not any(isinstance(each, TenantService) for each in case.engines[0].received)


def test_an_engine_without_a_readable_configuration_is_routed_by_its_load(case: Case) -> None:
    engine = FakeEngine(case.context, case.root, 0)
    (Path(engine.place.directory) / "config").write_bytes(b"?")
    case.add(engine)
    case.until(lambda: "configuration cannot be read" in case.figures().not_indexed.get(0, ""))
    assert case.ask(1) == Routed(1, 0, "only")


def test_an_engine_that_sends_no_events_is_not_indexed(case: Case) -> None:
    engine = FakeEngine(case.context, case.root, 0)
    config = msgspec.structs.replace(CONFIG, feeds_router=False)
    (Path(engine.place.directory) / "config").write_bytes(msgspec.msgpack.encode(config))
    case.add(engine)
    case.until(lambda: case.figures().not_indexed == {0: "it sends no events"})
    assert case.ask(1) == Routed(1, 0, "only")


def test_routes_while_its_figures_cannot_be_written(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(loop, "write_router_figures", fail)
    case.now += 2 * loop.TICK_S
    assert case.ask(1) == Routed(1, -1, "")
    monkeypatch.undo()
    case.until(lambda: case.figures().num_unplaced == 1)


@pytest.mark.parametrize("message", [Welcome(PROTOCOL_VERSION, ""), Route(1, 16, KEYS[:9])])
def test_a_message_that_a_router_does_not_take_ends_the_connection(case: Case, message: Any) -> None:
    case.front_end.send(message)
    assert isinstance(case.receive(), Refused)
