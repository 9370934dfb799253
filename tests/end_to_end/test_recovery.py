"""Processes of a real server die during streams; the clients notice only a pause."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence

import psutil
import pytest
from chaos import HUNG_S, client_ports, disturbed, held_recovery, is_empty, request_of, streams, until, within
from fault_server import FaultServer, Role, wait_until
from live_streams import Answer, StreamRequest, make_requests, stream
from raw_http import get
from served import Served

from quire.bench.measure.http_client import parse_metrics
from quire.launch.serve import SAME_SIGNAL_S

CANARY = request_of(12, temperature=0.0)
SIMULATED = ("--simulate", "constant:10", "--num-gpu-blocks-override", "500")
REQUESTS = make_requests(18, seed=5, longest=160)


@pytest.fixture(scope="module")
def undisturbed(demo_server: Served) -> list[Answer]:
    """The answers to REQUESTS and, last, to the canary, without a fault."""
    answers = asyncio.run(streams(demo_server.port, [*REQUESTS, CANARY]))
    assert [answer.error or answer.contradiction() for answer in answers] == [""] * len(answers)
    return answers


@pytest.fixture(autouse=True)
def canary(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check after each test that the shared server answers as before."""
    yield
    if "demo_server" in request.fixturenames:
        port, undisturbed = request.getfixturevalue("demo_server").port, request.getfixturevalue("undisturbed")
        assert asyncio.run(stream(port, CANARY)).same_as(undisturbed[-1])


def check_same(
    answers: Sequence[Answer], references: Sequence[Answer], requests: Sequence[StreamRequest] = REQUESTS
) -> None:
    for answer, reference, request in zip(answers, references, requests, strict=False):
        assert answer.error == "", request.body
        assert answer.choices == reference.choices and answer.num_tokens == reference.num_tokens, request.body


class TestAnswersSurviveProcesses:
    """Greedy, sampled, with logprobs, penalties, a stop string, a grammar, two answers at once, chat."""

    @pytest.mark.parametrize(
        ("role", "after"),
        [
            ("worker", 300),
            ("scheduler", 1),
            pytest.param("worker", 1, marks=pytest.mark.slow),
            pytest.param("scheduler", 300, marks=pytest.mark.slow),
        ],
    )
    def test_kill(self, demo_server: Served, undisturbed: list[Answer], role: Role, after: int) -> None:
        """Kill at the first delta, when most prompts are not computed yet, or in the middle of the tokens."""
        answers = asyncio.run(disturbed(demo_server.port, REQUESTS, lambda: demo_server.victims(role)[0].kill(), after))
        check_same(answers, undisturbed)

    @pytest.mark.full
    def test_stopped_worker_is_replaced(self, demo_server: Served, undisturbed: list[Answer]) -> None:
        victim = demo_server.victims("worker")[0]
        check_same(asyncio.run(disturbed(demo_server.port, REQUESTS, victim.suspend, 200)), undisturbed)
        assert not victim.is_running()
        assert any("have not finished a step in time" in line for line in demo_server.log)

    @pytest.mark.slow
    def test_scheduler_and_worker_at_once(self, demo_server: Served, undisturbed: list[Answer]) -> None:
        def kill_both() -> None:
            for role in ("worker", "scheduler"):
                demo_server.victims(role)[0].kill()

        check_same(asyncio.run(disturbed(demo_server.port, REQUESTS, kill_both, 200)), undisturbed)

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(20))
    def test_kill_at_random(self, demo_server: Served, undisturbed: list[Answer], seed: int) -> None:
        draw = random.Random(seed)
        role: Role = draw.choice(["worker", "scheduler"])
        victim = demo_server.victims(role)[0]
        act = draw.choice([victim.kill, victim.suspend]) if role == "worker" else victim.kill
        check_same(asyncio.run(disturbed(demo_server.port, REQUESTS, act, draw.randrange(1, 800))), undisturbed)


@pytest.mark.full
class TestFrontEnds:
    def test_streams_of_the_other_front_end_continue(self, demo_server: Served, undisturbed: list[Answer]) -> None:
        """Streams of the dead front end are aborted by the engine at once."""
        request = request_of(300, temperature=0.9, seed=3)

        async def run() -> None:
            (reference,) = await streams(demo_server.port, [request])
            answers: list[Answer] = []
            tasks = []
            while not all(client_ports(front_end) for front_end in demo_server.victims("frontend")):
                began = asyncio.Event()
                tasks.append(asyncio.create_task(stream(demo_server.port, request, lambda answer, at=began: at.set())))
                await began.wait()
                assert len(tasks) < 100
            victim = demo_server.victims("frontend")[0]
            victim.suspend()
            ports = client_ports(victim)
            victim.kill()
            answers = await asyncio.gather(*tasks)
            assert {answer.port for answer in answers if answer.error} <= ports
            whole = [answer for answer in answers if not answer.error]
            assert whole
            check_same(whole, [reference] * len(whole), [request] * len(whole))
            assert await until(lambda: two_front_ends(demo_server), HUNG_S)

        asyncio.run(run())

    def test_requests_of_the_dead_front_end_are_aborted(self, demo_server: Served, undisturbed: list[Answer]) -> None:
        async def run() -> None:
            began = asyncio.Event()
            task = asyncio.create_task(stream(demo_server.port, request_of(2000), lambda answer: began.set()))
            await began.wait()
            victim = next(front_end for front_end in demo_server.victims("frontend") if client_ports(front_end))
            victim.kill()
            assert await until(lambda: is_empty(demo_server.port), within(1))
            assert (await task).error.startswith(("cut off", "the stream ended"))
            assert await until(lambda: two_front_ends(demo_server), HUNG_S)

        asyncio.run(run())

    def test_a_new_front_end_refuses_no_request(self, demo_server: Served, undisturbed: list[Answer]) -> None:
        async def run() -> None:
            assert await until(lambda: two_front_ends(demo_server), HUNG_S)
            victim, other = demo_server.victims("frontend")
            victim.kill()
            idle = []

            async def has_new_one() -> bool:
                idle.append((await asyncio.open_connection("127.0.0.1", demo_server.port))[1])
                check_same(await streams(demo_server.port, [CANARY] * 4), [undisturbed[-1]] * 4)
                new = [p for p in demo_server.victims("frontend") if p.pid not in (victim.pid, other.pid)]
                return bool(new) and bool(client_ports(new[0]))

            assert await until(has_new_one, HUNG_S)
            for connection in idle:
                connection.close()

        asyncio.run(run())


async def two_front_ends(server: Served) -> bool:
    return len(server.victims("frontend")) == 2


class TestMetrics:
    @pytest.mark.parametrize("role", ["frontend", pytest.param("scheduler", marks=pytest.mark.full)])
    def test_every_front_end_has_the_sums_and_no_count_falls(
        self, demo_server: Served, undisturbed: list[Answer], role: Role
    ) -> None:
        async def scrape() -> dict[str, float]:
            return parse_metrics((await get(demo_server.port, "/metrics"))[1])

        async def scrapes() -> list[dict[str, float]]:
            return [await scrape() for _ in range(8)]  # each on a connection of its own

        def counts(found: dict[str, float]) -> dict[str, float]:
            """Return the counts of the front ends and of the supervisor."""
            names = [name for name in found if name.startswith(("request_", "e2e_")) or "restarts" in name]
            return {name: found[name] for name in names}

        async def run() -> None:
            before = counts(await scrape())
            check_same(await streams(demo_server.port, [CANARY] * 6), [undisturbed[-1]] * 6)
            first, *others = [counts(found) for found in await scrapes()]
            assert first["e2e_request_latency_seconds_count"] == before["e2e_request_latency_seconds_count"] + 6
            assert first["request_queue_time_seconds_sum"] > before["request_queue_time_seconds_sum"]
            assert all(other == first for other in others)
            victim = demo_server.victims(role)[0]
            victim.kill()
            assert await until(lambda: replaced(victim), HUNG_S)
            assert await until(lambda: has_state(demo_server, "/health", 200, "ready"), HUNG_S)
            for found in await scrapes():
                assert all(counts(found)[key] >= value for key, value in first.items())
            restarts = f"num_{role.replace('frontend', 'front_end')}_restarts_total"
            assert found[restarts] == first[restarts] + 1

        async def replaced(victim: psutil.Process) -> bool:
            alive = [*demo_server.victims("frontend"), *demo_server.victims("scheduler")]
            return len(alive) == 3 and victim not in alive

        asyncio.run(run())


@pytest.mark.full
class TestDuringRecovery:
    def test_requests_during_a_worker_restart(self, demo_server: Served, undisturbed: list[Answer]) -> None:
        """Metrics are served; a request aborted meanwhile ends; a request sent meanwhile is served afterwards."""

        async def run() -> None:
            began = asyncio.Event()
            aborted = asyncio.create_task(stream(demo_server.port, request_of(2000), lambda answer: began.set()))
            await began.wait()
            with held_recovery(demo_server):
                assert await until(lambda: has_state(demo_server, "/ready", 200, "recovering"), within(2))
                assert await has_state(demo_server, "/health", 200, "recovering")
                assert (await get(demo_server.port, "/metrics"))[0] == 200
                tasks = [asyncio.create_task(stream(demo_server.port, request)) for request in REQUESTS]
                await asyncio.sleep(0.1)
                aborted.cancel()
                assert not any(task.done() for task in tasks)
            check_same(await asyncio.gather(*tasks), undisturbed)
            assert await has_state(demo_server, "/ready", 200, "ready")

        asyncio.run(run())

    def test_requests_during_a_scheduler_restart(self, demo_server: Served, undisturbed: list[Answer]) -> None:
        """The new scheduler waits for a worker that does not join it."""

        async def run() -> None:
            worker = demo_server.victims("worker")[0]
            worker.suspend()
            demo_server.victims("scheduler")[0].kill()
            assert await until(lambda: has_state(demo_server, "/ready", 200, "recovering"), within(2))
            tasks = [asyncio.create_task(stream(demo_server.port, request)) for request in REQUESTS]
            for _ in range(10):
                assert (
                    (await get(demo_server.port, "/health"))[0] == (await get(demo_server.port, "/metrics"))[0] == 200
                )
                await asyncio.sleep(0.02)
            with contextlib.suppress(psutil.NoSuchProcess):  # the worker is replaced if it does not join in time
                worker.resume()
            check_same(await asyncio.gather(*tasks), undisturbed)

        asyncio.run(run())


async def has_state(server: Served, path: str, status: int, state: str) -> bool:
    return await get(server.port, path) == (status, f'{{"status":"{state}"}}')


@pytest.mark.full
class TestShutdown:
    """Each test has its own server with a simulated worker."""

    @pytest.mark.parametrize("stopped", [(), ("scheduler", "worker", "frontend")], ids=["all-run", "all-stopped"])
    def test_no_process_outlives_the_supervisor(self, stopped: Sequence[Role]) -> None:
        with FaultServer([*SIMULATED, "--api-server-count", "2"]) as server:
            for victim in [victim for role in stopped for victim in server.victims(role)]:
                victim.suspend()
            began = time.monotonic()
            server.process.kill()
            server.process.wait()
            assert wait_until(lambda: not server.leftovers(), HUNG_S) is not None, server.leftovers()
            assert time.monotonic() - began < within(2)

    def test_a_signal_to_all_drains_in_order(self) -> None:
        with FaultServer(SIMULATED) as server:
            request = request_of(60)

            async def run() -> list[Answer]:
                return await disturbed(
                    server.port, [request] * 8, lambda: os.killpg(server.process.pid, signal.SIGTERM), 10
                )

            answers = asyncio.run(run())
            assert [(answer.error, answer.num_tokens) for answer in answers] == [("", 60)] * 8
            assert server.process.wait(within(5)) == 0
            assert server.leftovers() == []

    def test_a_second_signal_stops_at_once(self) -> None:
        with FaultServer(SIMULATED) as server:

            async def signal_twice() -> None:
                os.killpg(server.process.pid, signal.SIGINT)
                # Not from the signal on: the supervisor may take it late, and would take the second for the same one.
                await asyncio.to_thread(wait_until, lambda: "a second signal" in str(server.log), HUNG_S)
                await asyncio.sleep(SAME_SIGNAL_S)
                assert server.process.poll() is None
                os.killpg(server.process.pid, signal.SIGINT)
                began = time.monotonic()
                assert await asyncio.to_thread(server.process.wait, HUNG_S) == 0
                assert time.monotonic() - began < within(2)

            answers = asyncio.run(disturbed(server.port, [request_of(2000)] * 4, signal_twice, 10))
            assert all(answer.error for answer in answers)
            assert wait_until(lambda: server.leftovers() == [], within(2)) is not None

    @pytest.mark.parametrize("first", [pytest.param(True, marks=pytest.mark.slow, id="at-start"), False])
    def test_workers_that_never_start_end_the_engine(self, first: bool) -> None:
        with FaultServer([*SIMULATED, "--no-standby-workers"], wait=not first) as server:

            async def kill_all() -> None:
                def kill_one() -> bool:
                    for worker in server.members("worker"):
                        worker.kill()
                    return server.process.poll() is not None

                assert await asyncio.to_thread(wait_until, kill_one, HUNG_S) is not None

            if first:
                asyncio.run(kill_all())
            else:
                (answer,) = asyncio.run(disturbed(server.port, [request_of(2000)], kill_all, 3))
                assert "engine_unavailable" in answer.error
            assert server.process.wait() == 1
            assert wait_until(lambda: "quire: error:" in server.log[-1], HUNG_S) is not None
            assert "killed by SIGKILL (5 times in a row, with no token in between)" in server.log[-1]
            assert server.leftovers() == []
