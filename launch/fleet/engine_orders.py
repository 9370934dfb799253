"""``quire engines``: lists the engines of a running server, and gives orders to it."""

import argparse
import json
import time
import urllib.error
from collections.abc import Callable

import msgspec

from quire.launch.plain_http import PlainServer, add_server_options, admin_key, bearer
from quire.protocol.errors import ConfigError, EngineError
from quire.protocol.process.fleet_orders import ALL, ORDERS
from quire.protocol.process.log import write_line

POLL_S = 0.5
STALLED_S = 120.0
"""Time without any change of the engines after which an order is no longer waited for."""


class ListedEngine(msgspec.Struct, frozen=True):
    """One engine, as ``/admin/engines`` lists it."""

    engine: int
    state: str
    starts: int
    detail: str | None
    kv_blocks: int | None
    kv_use: float | None
    running: int | None
    waiting: int | None


class _List(msgspec.Struct, frozen=True):
    engines: list[ListedEngine]


def add_engines_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "order",
        nargs="?",
        choices=ORDERS,
        metavar="ORDER",
        help="add (start another engine), drain (move its requests to others), resume (end that), remove (drain and "
        "end it), restart (drain, end and start it; without ENGINE all of them, one after the other)",
    )
    parser.add_argument("engine", nargs="?", type=int, metavar="ENGINE", help="number of the engine")
    add_server_options(parser, "the server's administrator's key")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until the order is carried out")
    parser.add_argument("--json", action="store_true", help="print the engines as one JSON object")


def run(args: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        ConfigError: invalid arguments, or the server cannot be reached.
        EngineError: the server refuses the order, or cannot carry it out.
    """
    needs_engine = args.order in ("drain", "resume", "remove")
    if needs_engine and args.engine is None:
        raise ConfigError(f"{args.order} needs the number of an engine: quire engines {args.order} ENGINE")
    if args.order == "add" and args.engine is not None:
        raise ConfigError(f"add takes no number of an engine (got {args.engine}): the server chooses it")
    if args.engine is not None and args.engine < 0:
        raise ConfigError(f"ENGINE must be at least 0 (got {args.engine})")
    if not (key := admin_key(args)):
        raise ConfigError("--admin-api-key is missing: the server's key, also in the variable QUIRE_ADMIN_API_KEY")
    server = EngineAdmin(args.url, key)
    engines = server.engines()
    if args.order is not None:
        engine = ALL if args.engine is None else args.engine
        before, engines = engines, server.order(args.order, engine)
        if not args.no_wait:
            engines = wait(server.engines, args.order, engine, before, time.monotonic, time.sleep)
    text = msgspec.json.encode(_List(engines)).decode() if args.json else table(engines)
    print(text, flush=True)


class EngineAdmin:
    """The administrator's routes of a server for its engines."""

    def __init__(self, url: str, key: str) -> None:
        self._server = PlainServer(url)
        self._headers = bearer(key)

    def engines(self) -> list[ListedEngine]:
        """
        Raises:
            ConfigError: the server cannot be reached.
            EngineError: it answered with an error.
        """
        return self._request("/admin/engines", "GET")

    def order(self, order: str, engine: int) -> list[ListedEngine]:
        """Give an order; return the engines before it. ``engine``: number of an engine, or ALL.

        Raises: as ``engines``.
        """
        return self._request(f"/admin/engines/{order}{'' if engine == ALL else f'?engine={engine}'}", "POST")

    def _request(self, path: str, method: str) -> list[ListedEngine]:
        try:
            return msgspec.json.decode(self._server.request(path, self._headers, method), type=_List).engines
        except urllib.error.HTTPError as error:
            with error:
                raise EngineError(_reason(error.code, error.read(2**16).decode(errors="replace"))) from None
        except msgspec.DecodeError:
            raise EngineError(f"{self._server.url}{path} did not answer with engines: is this Quire?") from None


def _reason(status: int, body: str) -> str:
    """Return what an error response says."""
    if status == 401:
        return "--admin-api-key: it is not an administrator's key of this server"
    try:
        found = json.loads(body)["error"]
        text, code = str(found["message"])[:500], found.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"the server returned {status}: is this a server of Quire?"
    if status == 404 and code == "not_found":
        return "the server has no administrator's key, so it has no such routes: start it with --admin-api-key"
    return text


def wait(
    read: Callable[[], list[ListedEngine]],
    order: str,
    engine: int,
    before: list[ListedEngine],
    clock: Callable[[], float],
    pause: Callable[[float], None],
) -> list[ListedEngine]:
    """Wait until an order is carried out, and write a line at each change of a state; return the engines then.

    Args:
        read: returns the engines.
        before: the engines before the order.

    Raises:
        EngineError: an engine did not start, or nothing has changed for STALLED_S.
    """
    shown = {each.engine: _state(each) for each in before}
    changed_at = clock()
    while True:
        engines = read()
        states = {each.engine: _state(each) for each in engines}
        for number, state in {**dict.fromkeys(shown, "removed"), **states}.items():
            if shown.get(number) != state:
                write_line(f"engine {number}: {state}")
                changed_at = clock()
        shown = states
        if is_done(order, engine, before, engines):
            return engines
        if clock() > changed_at + STALLED_S:
            raise EngineError(f"{order}: nothing has changed for {STALLED_S:g} s: see the log of the server")
        pause(POLL_S)


def is_done(order: str, engine: int, before: list[ListedEngine], engines: list[ListedEngine]) -> bool:
    """Whether an order has been carried out.

    Raises:
        EngineError: an engine that it starts has failed.
    """
    earlier = {each.engine: each for each in before}
    now = {each.engine: each for each in engines}
    match order:
        case "add":
            waited = [each for each in engines if each.engine not in earlier]
            _check_none_failed(waited)
            return any(each.state == "serving" for each in waited)
        case "drain":
            return engine not in now or now[engine].state == "drained"
        case "resume":
            return engine not in now or now[engine].state == "serving"
        case "remove":
            return engine not in now
        case _:
            numbers = [engine] if engine != ALL else [each.engine for each in before if each.state != "failed"]
            started = [now[n] for n in numbers if n in now and now[n].starts > earlier[n].starts]
            _check_none_failed(started)
            waited = [now[n] for n in numbers if n in now]
            return len(started) == len(waited) and all(each.state == "serving" for each in waited)


def _check_none_failed(engines: list[ListedEngine]) -> None:
    for each in engines:
        if each.state == "failed":
            raise EngineError(f"engine {each.engine} did not start: {each.detail} (the server tries again)")


def table(engines: list[ListedEngine]) -> str:
    """Return a table of the engines, for people."""
    head = ("engine", "state", "KV use", "running", "waiting", "starts", "")
    rows = [head, *(_row(each) for each in engines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def _row(each: ListedEngine) -> tuple[str, ...]:
    use = "-" if each.kv_use is None else f"{each.kv_use:.0%}"
    counts = ("-" if count is None else str(count) for count in (each.running, each.waiting))
    return (str(each.engine), each.state, use, *counts, str(each.starts), each.detail or "")


def _state(each: ListedEngine) -> str:
    return f"{each.state} (start {each.starts})" + (f": {each.detail}" if each.detail else "")
