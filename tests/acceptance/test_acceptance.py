"""The load harnesses: how answers are parsed, and what counts as lost or as growth. Most servers are scripts, one is
real.
"""

import asyncio
import json
import os
import random
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import front_end_cost
import many_streams as streams
import psutil
import pytest
import soak
from harness import main
from own_server import Holdings, Target, is_clean, serving
from raw_http import Link, connected
from served import Served
from soak_requests import LEAVES, SoakRequest, draw_request
from timed_streams import StreamedAnswer, TimedStream, drive, read_answer

from quire.protocol.errors import ConfigError

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str, finish_reason: str | None = None) -> bytes:
    return b"data: %b\n\n" % json.dumps({"choices": [{"text": text, "finish_reason": finish_reason}]}).encode()


def usage(tokens: int) -> bytes:
    return b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n' % tokens


DONE = b"data: [DONE]\n\n"
WHOLE = [HEAD + chunk(event("a")), chunk(event("b", "length")), chunk(usage(2) + DONE) + b"0\r\n\r\n"]


def answered(*parts: bytes, closed: bool = True) -> StreamedAnswer:
    """Parse an answer with parts that arrive one second apart."""
    stream = TimedStream(b"", 0.0, closed=closed)
    link = Link()
    link.expect(stream.reply)
    for second, part in enumerate(parts):
        link.data_received(part)
        stream.reply.pieces[:] = [(min(when, second), piece) for when, piece in stream.reply.pieces]
    return read_answer(stream)


@contextmanager
def scripted(answer: Callable[[socket.socket, int], None]) -> Iterator[tuple[str, int]]:
    """Run a server that passes each connection, with its number from 0, to ``answer``."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            number = 0
            while True:
                try:
                    opened, _ = listener.accept()
                except OSError:
                    return
                with opened:
                    answer(opened, number)
                number += 1

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[:2]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)


class TestStreams:
    def test_complete_answer_is_parsed(self) -> None:
        answer = answered(*WHOLE)
        assert (answer.text, answer.finish_reason, answer.num_output_tokens) == ("ab", "length", 2)
        assert (answer.done, answer.error, answer.gaps) == (True, "", [1.0, 1.0])

    @pytest.mark.parametrize("cut", range(0, sum(map(len, WHOLE)), 9))
    def test_answer_does_not_depend_on_how_its_bytes_are_split(self, cut: int) -> None:
        raw = b"".join(WHOLE)
        answer = answered(raw[:cut], raw[cut:])
        assert (answer.text, answer.num_output_tokens, answer.error) == ("ab", 2, "")

    @pytest.mark.parametrize(
        ("parts", "closed", "fault"),
        [
            (WHOLE[:2], True, "cut off"),
            (WHOLE[:2], False, "no end in time"),
            ([], True, "status missing"),
            ([b"HTTP/1.1 503 Busy\r\n\r\n{}"], True, "status 503"),
            ([HEAD + chunk(b'data: {"error":{}}\n\n')], True, "error event"),
            ([HEAD + chunk(event("a", "length") + usage(1) + DONE)], True, "1 tokens instead of 2"),
            ([HEAD + chunk(event("a", "stop") + usage(2) + DONE)], True, "finish_reason stop"),
            ([HEAD + chunk(event("a") + usage(2) + DONE)], True, "finish_reason missing"),
        ],
    )
    def test_incomplete_answer_counts_as_lost(self, parts: list[bytes], closed: bool, fault: str) -> None:
        fine, bad = answered(*WHOLE), answered(*parts, closed=closed)
        report = streams.make_report({}, [fine, bad], [], output_len=2)
        assert (report.results["lost"], report.results["faults"]) == (1, {fault: 1})

    def test_different_texts_of_one_prompt_are_counted(self) -> None:
        other = answered(HEAD + chunk(event("x")), chunk(event("y", "length") + usage(2) + DONE))
        answers = [answered(*WHOLE) for _ in range(streams.NUM_PROMPTS)]
        assert streams.make_report({}, answers, [], 2).results["prompts_with_several_texts"] == 0
        assert streams.make_report({}, [*answers, other], [], 2).results["prompts_with_several_texts"] == 1

    def test_stall_raises_the_ratio(self) -> None:
        even = StreamedAnswer([float(i) for i in range(60)], "t", "length", 60, done=True)
        stalled = StreamedAnswer([*even.deliveries[:-1], 70.0], "t", "length", 60, done=True)
        assert streams.make_report({}, [even], [], 60).results["p99_over_p50"] == 1.0
        assert streams.make_report({}, [stalled], [], 60).results["p99_over_p50"] == 12.0

    def test_background_requests_stop_when_the_streams_have_ended(self) -> None:
        def answer(opened: socket.socket, number: int) -> None:
            opened.recv(4096)
            opened.sendall(b"".join(WHOLE))

        with scripted(answer) as address:
            wanted = [TimedStream(b"x", 0.0) for _ in range(5)]
            side = [TimedStream(b"x", 0.0, background=True), TimedStream(b"x", 60.0, background=True)]
            asyncio.run(drive(address, [*wanted, *side], 20.0))
        assert all(read_answer(stream).done for stream in [*wanted, side[0]])
        assert side[1].sent == 0.0

    def test_refused_connection_loses_the_stream(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname()[:2]
        stream = TimedStream(b"x", 0.0)
        asyncio.run(drive(address, [stream], 5.0))
        assert read_answer(stream).error == "Connection refused"


class TestCost:
    """Two streams of a token per second; the front end takes 0.5 s for the requests and 0.1 s per second after them."""

    @staticmethod
    def figures(per_delivery: int = 1) -> dict[str, Any]:
        streams = [TimedStream(b"", 0.0, closed=True) for _ in range(2)]
        for offset, stream in enumerate(streams):
            stream.reply.status = 200
            stream.reply.pieces = [(float(second + offset), event("a")) for second in range(10)]
            stream.reply.pieces.append((10.0 + offset, event("a", "length") + usage(11 * per_delivery) + DONE))
        readings = [front_end_cost.Reading(at / 2, 0.5 + at / 20) for at in range(23)]
        readings[0] = front_end_cost.Reading(0.0, 0.0)
        return front_end_cost.figures_of(streams, readings, 11 * per_delivery)

    def test_tokens_and_requests_are_measured_separately(self) -> None:
        found = self.figures()
        assert found["us_per_token"] == pytest.approx(0.1e6 / 2)
        assert found["us_per_request"] == pytest.approx((0.5e6 + 11 * 0.1e6 - 22 * 0.05e6) / 2)
        assert (found["p99_over_p50"], found["steady_s"], found["lost"]) == (1.0, 9.0, 0)

    def test_merged_tokens_are_noted(self) -> None:
        report = front_end_cost.make_report({}, {2: [self.figures(), self.figures(2)], 4: [self.figures(2)]})
        assert report.results["streams"]["2"]["us_per_token"] == pytest.approx(0.1e6 / 4)
        assert report.results["last_over_first"] == 1.0
        assert len(report.notes) == 2


class TestConnection:
    def fetch(self, address: tuple[str, int], count: int) -> list[tuple[int, bytes]]:
        async def run() -> list[tuple[int, bytes]]:
            async with connected(address) as connection:
                replies = [await connection.fetch(b"x") for _ in range(count)]
                return [(reply.status, reply.body) for reply in replies]

        return asyncio.run(run())

    def test_request_on_a_closing_connection_is_resent(self) -> None:
        def answer(opened: socket.socket, number: int) -> None:
            opened.recv(1)
            opened.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n%d" % number)
            opened.recv(1)  # the second request is received but not answered

        with scripted(answer) as address:
            assert self.fetch(address, 2) == [(200, b"0"), (200, b"1")]

    def test_incomplete_response_raises(self) -> None:
        def answer(opened: socket.socket, number: int) -> None:
            opened.recv(1)
            opened.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc")

        with scripted(answer) as address, pytest.raises(EOFError):
            self.fetch(address, 1)


def sample(at: int, rss_mib: float, fds: int = 10, pss_mib: float | None = None) -> soak.Sample:
    pss = rss_mib if pss_mib is None else pss_mib
    return soak.Sample(at, {"http": Holdings(int(rss_mib * soak.MIB), int(pss * soak.MIB), fds, 3)})


class TestSoak:
    @pytest.mark.parametrize("per_10k", [0.0, 0.5, 2.0, 20.0, -3.0])
    def test_growth_after_the_warm_up_is_measured(self, per_10k: float) -> None:
        grown = [sample(at, 80 + per_10k * (at - 30_000) / 10_000) for at in range(30_000, 100_001, 5_000)]
        found = soak.make_report(
            {}, [sample(0, 10), *grown], soak.Outcome(Counter(), Counter()), warm_up=30_000
        ).results
        assert found["growth"]["http"]["rss_mib_per_10k"] == pytest.approx(per_10k, abs=0.01)
        assert found["grew"] == (["http"] if per_10k >= 1 else [])

    @pytest.mark.parametrize(("last", "grew"), [(10, []), (14, []), (15, ["http"])])
    def test_leaked_descriptors_count_as_growth(self, last: int, grew: list[str]) -> None:
        samples = [sample(0, 50), sample(50, 50, fds=14), sample(70, 50, fds=80), sample(100, 50, fds=last)]
        report = soak.make_report({}, samples, soak.Outcome(Counter(), Counter()), warm_up=50)
        assert report.results["grew"] == grew

    def test_slope_of_a_line(self) -> None:
        assert soak.slope([(0, 1), (1, 3), (2, 5)]) == pytest.approx(2.0)
        assert soak.slope([(1, 1), (1, 3)]) == 0.0

    def test_same_seed_draws_the_same_load_of_every_kind(self) -> None:
        first, second = ([draw_request(draw) for _ in range(500)] for draw in (random.Random(3), random.Random(3)))
        assert first == second
        assert {request.kind for request in first} >= {"plain", "grammar", "wrong", "left", "chat"}
        assert {request.leaves for request in first} == {"", *LEAVES}

    @pytest.mark.parametrize(
        ("status", "body", "fault"),
        [(200, DONE, ""), (503, b"", "status 503"), (200, b'data: {"error":1}\n\n', "no end of the stream")],
    )
    def test_answer_is_checked(self, status: int, body: bytes, fault: str) -> None:
        def answer(opened: socket.socket, number: int) -> None:
            opened.recv(4096)
            opened.sendall(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))

        async def run(address: tuple[str, int]) -> str:
            target = Target(f"http://127.0.0.1:{address[1]}", "", None)
            async with connected(address) as connection:
                return await soak.send_and_check(target, connection, SoakRequest("s", "/", b"{}", (200,), True), 0.5)

        with scripted(answer) as address:
            assert asyncio.run(run(address)) == fault


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["streams", "--num-streams", "0"], "--num-streams"),
        (["streams", "--output-len", "0"], "--output-len"),
        (["cost", "--rounds", "0"], "--rounds"),
        (["streams", "--side-interval", "0"], "--side-interval"),
        (["streams", "--url", "http://127.0.0.1:1", "--serve-args=--x"], "--serve-args"),
        (["soak", "--num-requests", "5"], "--warm-up"),
        (["soak", "--samples", "1"], "--samples"),
        (["hostile", "--url", "http://127.0.0.1:1"], "--url"),
        (["hostile", "--attacks", "tickling"], "--attacks tickling"),
        (["hostile", "--concurrency", "0"], "--concurrency"),
    ],
)
def test_invalid_flags_are_rejected(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    assert ended.value.code == ConfigError.exit_status
    assert message in capsys.readouterr().err


@pytest.mark.full
def test_error_of_a_server_that_does_not_start_has_the_reason() -> None:
    with pytest.raises(ConfigError, match="block-size"), serving(None, None, [], "--block-size 0"):
        pass


@pytest.mark.parametrize(
    ("gauges", "clean"),
    [((0, 0, 8, 8), True), ((1, 0, 8, 8), False), ((0, 1, 8, 8), False), ((0, 0, 7, 8), False)],
)
def test_clean_means_no_requests_and_all_blocks_free(gauges: tuple[int, ...], clean: bool) -> None:
    names = ("num_requests_running", "num_requests_waiting", "num_free_blocks", "num_usable_blocks")
    assert is_clean(dict(zip(names, gauges, strict=True))) is clean
    assert not is_clean({})


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    served = Served("--num-gpu-blocks-override", "2048")
    yield served
    assert served.stop() == 0


def bench(server: Served, tmp_path: Path, *words: str) -> dict[str, Any]:
    file = tmp_path / "found.json"
    main([*words, "--url", server.url, "--json", str(file)])
    found: dict[str, Any] = json.loads(file.read_text())["results"]
    return found


@pytest.mark.full
def test_streams_on_a_real_server(server: Served, tmp_path: Path) -> None:
    words = ["--num-streams", "32", "--output-len", "16", "--side-len", "300", "--side-interval", "0.1"]
    found = bench(server, tmp_path, "streams", *words)
    assert (found["lost"], found["side_lost"], found["output_tokens"]) == (0, 0, 32 * 16)
    assert found["side_requests"] > 0
    assert is_clean(found["after"])


@pytest.mark.full
def test_soak_on_a_real_server(server: Served, tmp_path: Path) -> None:
    found = bench(server, tmp_path, "soak", "--num-requests", "300", "--warm-up", "100", "--concurrency", "16")
    assert found["faults"] == {}
    assert sum(found["kinds"].values()) == 300
    assert is_clean(found["after"])


@pytest.mark.full
def test_terminated_harness_stops_its_server() -> None:
    before = signal.getsignal(signal.SIGTERM)
    served: list[Target] = []
    with pytest.raises(KeyboardInterrupt), serving(None, None, ["--simulate", "constant:1"], None) as target:
        served.append(target)
        os.kill(os.getpid(), signal.SIGTERM)
    assert served[0].root is not None
    assert not psutil.pid_exists(served[0].root)
    assert signal.getsignal(signal.SIGTERM) is before
