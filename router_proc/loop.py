"""The loop of the router process: receive messages, choose, answer."""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from quire.protocol.process.child import Child, Command
from quire.protocol.process.log import event_logger
from quire.protocol.process.router_figures import RouterFigures, write_router_figures
from quire.protocol.routing import KEY_BYTES, RoutingConfig
from quire.protocol.wire.clients import Clients
from quire.protocol.wire.link_messages import PROTOCOL_VERSION, Hello, Welcome
from quire.protocol.wire.router_messages import Placed, Progress, Route, Routed
from quire.router_proc.core.events import EnginesKnown, FrontEndDropped, RouterEvent
from quire.router_proc.core.router import Router
from quire.router_proc.engines import KnownEngines
from quire.router_proc.sockets import RouterSockets
from quire.router_proc.trace import Chosen, RouterTrace

log = event_logger("router")

TICK_S = 1.0


class RouterLoop:
    """Moves messages between the front ends, the engines and the Router. Chooses nothing itself."""

    def __init__(
        self,
        config: RoutingConfig,
        sockets: RouterSockets,
        child: Child,
        directory: Path,
        incarnation: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``directory``: receives the figures. Raises ConfigError if the trace cannot be written."""
        self.router = Router(config)
        self._sockets = sockets
        self._child = child
        self._directory = directory
        self._clock = clock
        self._trace = RouterTrace(Path(config.trace), config, incarnation) if config.trace else None
        self._clients = Clients(sockets.hub, Welcome(PROTOCOL_VERSION, ""), self._connected, self._disconnected)
        self._engines = KnownEngines(config, sockets, self._consume, os.getpid())
        self._tick_at = clock()
        self._running = True
        sockets.add(child.fileno())

    def run(self) -> None:
        """Run until the fleet sends ``stop``."""
        self._child.watch_progress(lambda: None)
        try:
            while self._running:
                self._wait()
                self.turn()
        finally:
            self.close()

    def close(self) -> None:
        """Close the links to engines, and the trace."""
        self._engines.close()
        if self._trace is not None:
            self._trace.close()

    def turn(self) -> None:
        """Run one turn. Questions are answered before and after the events of engines, which may be many."""
        self._child.progress()
        for command in self._child.take_commands():
            self._on_command(command)
        self._answer()
        # Between two looks at the questions: a burst of events is bounded by MAX_MESSAGES per engine, and a question
        # that arrived during it need not wait for the next turn.
        self._engines.receive(self._clock())
        self._answer()
        if self._clock() >= self._tick_at:
            self._tick(self._clock())

    def _wait(self) -> None:
        if not self._sockets.wait(0):
            self.router.index.apply()  # now, rather than when a question waits
            self._sockets.wait(max(0, int((self._tick_at - self._clock()) * 1000) + 1))

    def _on_command(self, command: Command) -> None:
        match command.kind:
            case "stop":
                self._running = False
            case "engines":
                # The Router learns of an engine before its events are followed; events of an unknown engine are
                # dropped.
                self._consume(EnginesKnown(command.engines))
                self._engines.update(command.engines)
                self._tick_at = self._clock()  # a new engine's events are requested at once
            case "front_end_exited":
                self._clients.on_process_exit(command.pid)

    def _answer(self) -> None:
        """Consume all messages of front ends, and send the answers."""
        while (received := self._clients.receive()) is not None:
            client, message = received[0], received[1].message
            if isinstance(message, Route) and len(message.keys) % KEY_BYTES:
                self._clients.refuse(client, f"keys of {len(message.keys)} bytes: must be a multiple of {KEY_BYTES}")
            elif isinstance(message, Route | Progress | Placed):
                self._consume(message, client)
            else:
                self._clients.refuse(client, f"unexpected {type(message).__name__}")
        for client, routed in self.router.take_messages():
            if self._trace is not None:
                self._trace.write(Chosen(routed, client))
            if log.isEnabledFor(logging.DEBUG):
                _log_choice(client, routed)
            self._clients.send(client, routed)

    def _consume(self, event: RouterEvent, client: int = 0) -> None:
        if self._trace is not None:
            self._trace.consumed(event, client)
        # Recorded first: if the Router fails on an event, the trace ends with it.
        self.router.consume(event, client)

    def _connected(self, client: int, hello: Hello) -> None:
        log.debug("front end connected", client=client, pid=hello.pid)

    def _disconnected(self, client: int) -> None:
        self._consume(FrontEndDropped(client))

    def _tick(self, now: float) -> None:
        self._tick_at = now + TICK_S
        self._engines.tick(now, self.router.index.overfull)
        with contextlib.suppress(OSError):  # on a full disk, requests are routed without figures
            write_router_figures(self._directory, self.figures())
        if self._trace is not None:
            self._trace.flush()

    def figures(self) -> RouterFigures:
        found = self.router.figures()
        not_indexed = self._engines.not_indexed
        return msgspec.structs.replace(
            found,
            indexed_blocks={engine: n for engine, n in found.indexed_blocks.items() if engine not in not_indexed},
            not_indexed=not_indexed,
            gaps=self._engines.gaps,
            damaged=self._engines.damaged,
            cpu_seconds=time.process_time(),
        )


def _log_choice(client: int, routed: Routed) -> None:
    log.debug(
        "routed",
        client=client,
        ticket=routed.ticket,
        engine=routed.engine,
        reason=routed.reason,
        num_cached_tokens=routed.num_cached_tokens,
    )
