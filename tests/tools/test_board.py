"""The tool that evaluates the board's queries: what it asks Prometheus for, and how it reports what fails."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import board

EMPTY, REFUSED = "quire:slow_readers_total", "quire:num_slow_steps_total"


class Handler(BaseHTTPRequestHandler):
    """Answers queries as Prometheus does: a value in the middle of the range, except for two metrics."""

    def do_GET(self) -> None:
        fields = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        self.server.queries.append(fields["query"])  # type: ignore[attr-defined]
        middle = (float(fields["start"]) + float(fields["end"])) / 2
        series = [{"metric": {"reason": "kv_blocks"}, "values": [[middle, "2.5"]]}]
        status, answer = 200, {"data": {"result": [] if EMPTY in fields["query"] else series}}
        if REFUSED in fields["query"]:
            status, answer = 400, {"error": "parse error"}
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def prometheus() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.queries = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def run(prometheus: Any, monkeypatch: pytest.MonkeyPatch, *flags: str) -> str:
    """Return the problems that end the program."""
    url = f"http://127.0.0.1:{prometheus.server_port}"
    monkeypatch.setattr(sys, "argv", ["board.py", "--prometheus", url, "--rate-interval", "9s", *flags])
    with pytest.raises(SystemExit) as ended:
        board.main()
    return str(ended.value.code)


def test_queries_that_fail_or_are_empty_are_named(
    prometheus: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = run(prometheus, monkeypatch).splitlines()
    assert [line.split(": ")[:2] for line in problems] == [
        ["Refused requests", "no data"],
        ["Restarts and slow steps", "parse error"],
    ]
    panels = json.loads(board.BOARD.read_text())["panels"]
    assert len(prometheus.queries) == sum(len(panel["targets"]) for panel in panels)
    assert not [query for query in prometheus.queries if "$" in query] and "[9s]" in "".join(prometheus.queries)
    printed = capsys.readouterr().out.splitlines()
    assert "Waiting requests by reason: kv_blocks" in printed and len(printed) == len(panels)


def test_values_are_placed_by_their_time(prometheus: Any) -> None:
    source = board.Source(f"http://127.0.0.1:{prometheus.server_port}", 1e9 + 0.25, 0.2, {})
    panel = {"title": "t", "targets": [{"expr": "x", "legendFormat": "by {{reason}}"}]}
    curves, failed = board.evaluate(panel, source)
    assert not failed and [*curves] == ["by kv_blocks"]
    assert [number for number, value in enumerate(curves["by kv_blocks"]) if value == 2.5] == [board.NUM_STEPS // 2]


def test_panels_are_drawn(prometheus: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(prometheus, monkeypatch, "--png", str(tmp_path / "board.png"))
    assert (tmp_path / "board.png").read_bytes().startswith(b"\x89PNG")
