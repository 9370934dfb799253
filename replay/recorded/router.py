"""Exact replay of a router's trace: feed its events to a new Router, and compare every choice."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from quire.bench.measure.report import Table
from quire.protocol.errors import ConfigError
from quire.protocol.wire.router_messages import Route, Routed
from quire.replay.output import ReplayResult
from quire.replay.recorded.decompress import DECOMPRESSION_ERRORS, open_decompressed
from quire.replay.recorded.exact import IMPOSSIBLE
from quire.replay.recorded.reader import LONGEST_LINE
from quire.router_proc.core.router import Router
from quire.router_proc.trace import FORMAT, VERSION, Consumed, RouterHeader, RouterLine


class Mismatch(msgspec.Struct):
    """The first choice that differs: its line, and what was chosen."""

    line: int
    recorded: str
    decided: str


class Replayed(msgspec.Struct):
    """Counts of a replayed trace, up to its first difference. ``policies``: of its routers, in order."""

    policies: list[str] = []
    num_events: int = 0
    num_questions: int = 0
    choices: dict[str, int] = {}
    difference: Mismatch | None = None
    notes: list[str] = []


def replay_router(path: Path) -> ReplayResult:
    """Replay a router's trace, and return the result with exit status 1 if a choice differs.

    Raises:
        ConfigError: a line is damaged, or the trace is of another version.
    """
    began = time.perf_counter()
    found = compare_choices(path)
    seconds = time.perf_counter() - began
    difference = found.difference
    figures = {"trace": str(path), "format": "router", **msgspec.to_builtins(found), "wall_s": round(seconds, 3)}
    figures["decisions_equal"] = difference is None
    head = [f"{path.name}: as recorded", f"policy: {', '.join(found.policies)}"]
    result = ReplayResult(figures, [], head, notes=found.notes)
    result.tables.append(Table("choices", ("number",), [(name, [n]) for name, n in sorted(found.choices.items())]))
    if difference is None:
        head.append(f"replayed exactly: all choices are equal ({found.num_questions:,} questions)")
    else:
        result.exit_status = 1
        result.problem = (
            f"choices differ first in line {difference.line}: recorded {difference.recorded}, "
            f"now {difference.decided} ({path.name})"
        )
    return result


def compare_choices(path: Path) -> Replayed:
    """Compare the choices of a router's trace up to the first difference. Raises ConfigError for a damaged line."""
    found = Replayed()
    router: Router | None = None
    answers: list[tuple[int, Routed]] = []
    for number, line in _lines(path, found.notes):
        if isinstance(line, RouterHeader):
            router, answers = Router(line.config), []  # what an earlier router had not answered, it never did
            found.policies.append(line.config.policy)
        elif router is None:
            raise ConfigError(f"{path}:{number}: the trace does not begin with a header")
        elif isinstance(line, Consumed):
            try:
                router.consume(line.event, line.client)
            except IMPOSSIBLE as error:
                raise ConfigError(f"{path}:{number}: impossible event, or one before it: {error}") from None
            found.num_events += 1
            found.num_questions += isinstance(line.event, Route)
        else:
            answers += router.take_messages()
            decided = answers.pop(0) if answers else None
            if decided != (line.client, line.message):
                found.difference = Mismatch(number, _text(line.client, line.message), _text(*(decided or (0, None))))
                return found
            name = f"{line.message.engine} {line.message.reason}".strip()
            found.choices[name] = found.choices.get(name, 0) + 1
    return found


def _text(client: int, message: Routed | None) -> str:
    return "none" if message is None else f"{message} for client {client}"


def _lines(path: Path, notes: list[str]) -> Iterator[tuple[int, RouterLine]]:
    decoder = msgspec.json.Decoder(RouterLine)
    number = 0
    try:
        with open_decompressed(path) as stream:
            while raw := stream.readline(LONGEST_LINE):
                number += 1
                try:
                    line = decoder.decode(raw)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    if not raw.endswith(b"\n"):
                        notes.append(f"the last line, {number}, is cut short")
                        return
                    raise ConfigError(f"{path}:{number}: the line is damaged: {error}") from None
                if isinstance(line, RouterHeader) and (line.format, line.version) != (FORMAT, VERSION):
                    raise ConfigError(f"{path}:{number}: version {line.version} of the format; this reads {VERSION}")
                yield number, line
    except DECOMPRESSION_ERRORS as error:
        raise ConfigError(f"{path}:{number + 1}: {error}") from None
