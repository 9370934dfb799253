"""``quire top``: shows a running server's figures, from ``/metrics`` and, with a key, ``/admin/state``."""

import argparse
import json
import math
import shutil
import sys
import time
import urllib.error
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from quire.launch.plain_http import PlainServer, add_server_options, admin_key, bearer, server_key
from quire.launch.top.overview import Figures, overview
from quire.launch.top.scrape import Scrape
from quire.launch.top.screen import screen
from quire.launch.top.state import AdminState, decode_state
from quire.protocol.errors import ConfigError, EngineError

WINDOW_S = 10.0
"""Rates and times of the live screen are of the last seconds, so that single requests stay visible."""

ENTER_SCREEN, LEAVE_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, REST_OF_LINE, REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def add_top_flags(parser: argparse.ArgumentParser) -> None:
    add_server_options(parser, "the server's administrator's key, to show tenants and requests too")
    parser.add_argument(
        "--api-key", metavar="KEY", help="key to send, for a proxy that demands one (the variable QUIRE_API_KEY)"
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=2.0,
        metavar="S",
        help="seconds between scrapes; 0 with --once: a single scrape, with figures since the start (2)",
    )
    parser.add_argument("--once", action="store_true", help="print the figures of one interval and exit")
    parser.add_argument("--json", action="store_true", help="print one JSON object per interval instead of the screen")


def run(args: argparse.Namespace) -> None:
    """Run the command; Ctrl-C ends it with status 0.

    Raises:
        ConfigError: invalid flags, or the server cannot be reached at the start.
        EngineError: the server does not answer with metrics.
    """
    least = 0.0 if args.once else 0.1
    if not (math.isfinite(args.interval) and least <= args.interval <= 3600):
        raise ConfigError(f"--interval must be between {least:g} and 3600 seconds (got {args.interval:g})")
    server = ServerMetrics(args.url, args.api_key, admin_key(args))
    watch = Watch(server, args.interval, time.monotonic, time.sleep)
    try:
        if args.once:
            watch.once().print(as_json=args.json)
        elif args.json or not sys.stdout.isatty():
            while True:
                watch.next().print(as_json=args.json)
        else:
            _live(watch)
    except KeyboardInterrupt:
        return


class ServerMetrics:
    """Reads ``/metrics``, ``/health`` and ``/admin/state`` of a server."""

    def __init__(self, url: str, api_key: str | None, admin_api_key: str = "") -> None:
        self._server = PlainServer(url)
        self.url = self._server.url
        self._headers = bearer(server_key(api_key))
        self._admin_headers = bearer(admin_api_key)

    def metrics(self) -> str:
        """
        Raises:
            ConfigError: the server cannot be reached.
            EngineError: it answered with an error.
        """
        try:
            return self._get("/metrics")
        except urllib.error.HTTPError as error:
            error.close()
            raise EngineError(f"{self.url}/metrics returned {error.code}: is this a server of Quire?") from None

    def state(self) -> str:
        """Return the state in the answer of /health, with any status; "" if it has none."""
        try:
            text = self._get("/health")
        except urllib.error.HTTPError as error:
            with error:
                text = error.read(1024).decode(errors="replace")
        except ConfigError:
            return ""
        try:
            return str(json.loads(text)["status"])[:40]
        except (ValueError, KeyError, TypeError):
            return ""

    def admin_state(self) -> AdminState:
        """Return the answer of /admin/state, or an empty one without a key.

        Raises:
            EngineError: the server refuses the key, or does not answer.
        """
        if not self._admin_headers:
            return AdminState()
        try:
            return decode_state(self._get("/admin/state", self._admin_headers))
        except urllib.error.HTTPError as error:
            error.close()
            reason = {
                401: "it is not a key of this server",
                404: "the server has no such key, so it has no administrator's routes",
            }.get(error.code, "the scheduler did not answer")
            raise EngineError(f"--admin-api-key: /admin/state returned {error.code}: {reason}") from None
        except ConfigError as error:
            raise EngineError(f"/admin/state cannot be read: {error}") from None

    def _get(self, path: str, headers: dict[str, str] | None = None) -> str:
        return self._server.request(path, self._headers if headers is None else headers)


class Watch:
    """Scrapes a server at an interval and keeps the scrapes of the window. Clock and pause are passed in."""

    def __init__(
        self, server: ServerMetrics, interval: float, clock: Callable[[], float], pause: Callable[[float], None]
    ) -> None:
        self.url = server.url
        self._server, self._interval, self._clock, self._pause = server, interval, clock, pause
        self._scrapes: deque[Scrape] = deque()

    def once(self) -> "Shown":
        """Return the figures of one interval, or with interval 0 those since the start."""
        return self.scrape() if self._interval == 0 else self.next()

    def next(self) -> "Shown":
        """Wait for the interval and return the figures of the window. The first call makes two scrapes."""
        if not self._scrapes:
            self.scrape()
        self._pause(self._interval)
        return self.scrape()

    def scrape(self) -> "Shown":
        """Return the figures of the window up to now; without an earlier scrape, those since the start."""
        now = Scrape.parse(self._server.metrics(), self._clock())
        while len(self._scrapes) > 1 and self._scrapes[1].time <= now.time - WINDOW_S:
            self._scrapes.popleft()
        earlier = self._scrapes[0] if self._scrapes else None
        self._scrapes.append(now)
        figures = overview(now, earlier, self._server.state())
        try:
            return Shown(self.url, figures, self._server.admin_state())
        except EngineError as error:
            return Shown(self.url, figures, AdminState(admin_error=str(error)))


class Shown(NamedTuple):
    """What is shown of a server at one time."""

    url: str
    figures: Figures
    state: AdminState

    def lines(self, width: int = 120) -> list[str]:
        return screen(self.figures, self.url, self.state.lines(), width)

    def print(self, *, as_json: bool) -> None:
        figures = {**self.figures, **msgspec.structs.asdict(self.state)}
        print(msgspec.json.encode(figures).decode() if as_json else "\n".join([*self.lines(), ""]), flush=True)


def _live(watch: Watch) -> None:
    """Redraw the screen until Ctrl-C. If the server cannot be reached later, the error is shown until it can."""
    shown, errors = watch.scrape(), list[str]()
    sys.stdout.write(ENTER_SCREEN)
    try:
        while True:
            width, height = shutil.get_terminal_size()
            lines = [*errors, *shown.lines(width)][: max(1, height - 1)]
            sys.stdout.write(HOME + "".join(f"{line[:width]}{REST_OF_LINE}\r\n" for line in lines) + REST_OF_SCREEN)
            sys.stdout.flush()
            try:
                shown, errors = watch.next(), []
            except (ConfigError, EngineError) as failure:
                errors = [str(failure)]
    finally:
        sys.stdout.write(LEAVE_SCREEN)
        sys.stdout.flush()
