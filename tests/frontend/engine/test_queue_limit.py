"""A full queue: 503 over HTTP, and no effect on callers of the offline API."""

import ast
import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pulled_sequence import PulledSequence
from scheduler_driver import Driver, expected_tokens
from tiers import thinned

import quire
from quire.frontend.engine.scheduler_link import Readers
from quire.frontend.engine.session import Session
from quire.frontend.engine.streams import Stream
from quire.frontend.engine.terms import Terms
from quire.frontend.engine.update import Update
from quire.frontend.http.app import make_app
from quire.frontend.http.schema.errors import STATUS_OF_CODE
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.text.prompts import Prompt
from quire.frontend.text.text_in import TextIn
from quire.frontend.text.text_out import TokenTexts
from quire.launch.offline.batch import Batch
from quire.launch.offline.reading import Reading
from quire.launch.offline.samples import PromptSamples
from quire.protocol.errors import InvalidRequest
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.front_end_messages import Abort, AddRequest, EngineState, Rejected, StepOutputs
from quire.protocol.wire.link_messages import Hello, Message

VOCAB_SIZE = 300
PROMPTS = [[i, i + 1, i + 2] for i in range(3, 43)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=9, n=2, ignore_eos=True)


class ScheduledEngine(Driver):
    """The real scheduler and a simulated worker behind both client interfaces; runs a step when a caller waits.

    ``refuse_from``: number of waiting requests at which the queue is full, independent of the settings.
    """

    state = "ready"
    seconds_without_progress = 0.0
    pause_kind = ""
    places = ()

    def __init__(self, refuse_from: int | None = None, **settings: Any) -> None:
        super().__init__(vocab_size=VOCAB_SIZE, **settings)
        self.max_model_len = self.config.max_model_len
        self.vocab_size = VOCAB_SIZE
        self.refuse_from = refuse_from
        self.num_queue_full = 0
        self.arrivals: list[AddRequest] = []
        self.num_aborts = 0
        self.readers = Readers()
        self.session = Session(self.send, 1)
        self.session.begin_link()
        self.session.take(EngineState("ready"))

    def send(self, message: Message) -> None:
        if isinstance(message, AddRequest):
            self.arrivals.append(message)
            if self.refuse_from is not None and self.scheduler.table.num_waiting >= self.refuse_from:
                self._reject(Rejected(message.request_id, "queue_full", "", "the queue is full"))
                return
        self.num_aborts += isinstance(message, Abort)
        if not isinstance(message, Hello):
            self.consume(message)

    # ---- as quire.launch.offline.batch.BlockingEngine

    def submit(self, request: AddRequest, on_update: Callable[[], None], parent: Stream | None = None) -> Stream:
        return self.session.add(request, on_update, parent)

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    def wait(self) -> None:
        self.step()

    # ---- as quire.frontend.engine.client.EngineClient

    async def add(
        self,
        request: AddRequest,
        on_update: Callable[[], None],
        *,
        parent: "ScheduledSequence | None" = None,
        num_shared: int = 0,
    ) -> "ScheduledSequence":
        stream = self.session.add(request, parent=None if parent is None else parent.stream)
        sequence = ScheduledSequence(self, stream)
        sequence.start(self.readers, on_update)
        return sequence

    async def statistics_by_engine(self) -> Any:
        return {0: self.scheduler.statistics()}

    def _collect(self) -> None:
        for _, message in self.scheduler.take_messages():
            match message:
                case StepOutputs():
                    self.session.take(message)
                case Rejected():
                    self._reject(message)

    def _reject(self, message: Rejected) -> None:
        self.num_queue_full += message.code == "queue_full"
        self.session.take(message)


class ScheduledSequence(PulledSequence):
    """As ``quire.frontend.engine.streams.Stream``; reading it runs the engine."""

    def __init__(self, engine: ScheduledEngine, stream: Stream) -> None:
        self.request_id = stream.request_id
        self._engine = engine
        self.stream = stream

    async def updates(self) -> AsyncIterator[Update]:
        while True:
            update = self.stream.take()
            if update is not None:
                yield update
                if update.ended is not None:
                    return
            await asyncio.sleep(0)
            self._engine.step()

    def stop_at(self, num_output_tokens: int) -> None:
        self._engine.session.stop_at(self.stream, num_output_tokens)

    def abort(self) -> None:
        self._engine.session.abort(self.stream)


class TestOverHttp:
    @pytest.fixture
    def connect_to(self, client: Any, text_in: TextIn) -> Callable[[Any], Any]:
        settings = ServerSettings(text_in=text_in, served_model_names=("tiny",))
        return lambda engine: type(client)(make_app(engine, settings))

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("route", ["complete", "chat"])
    def test_a_full_queue_is_a_503_with_retry_after(self, client: Any, engine: Any, route: str, stream: bool) -> None:
        engine.ending = InvalidRequest("4 requests wait already", None, "queue_full")
        response = getattr(client, route)(stream=stream)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json() == {
            "error": {
                "message": "4 requests wait already",
                "type": "service_unavailable_error",
                "param": None,
                "code": "queue_full",
            }
        }
        metric = 'quire:admission_rejections_total{model_name="tiny",reason="queue_full"} 1.0'
        assert metric in client.get("/metrics").text.splitlines()

    def test_other_refusals_have_no_retry_after(self, client: Any, engine: Any) -> None:
        engine.ending = InvalidRequest("the prompt does not fit the pool", "prompt", "kv_pool_too_small")
        response = client.complete()
        assert response.status_code == 400 and "retry-after" not in response.headers

    @pytest.mark.parametrize("limit", ["refuse_from", "max_num_queued_reqs"])
    @pytest.mark.parametrize("stream", [False, True])
    def test_accepted_samples_are_aborted_when_others_are_refused(
        self, connect_to: Callable[[Any], Any], stream: bool, limit: str
    ) -> None:
        engine = ScheduledEngine(max_num_seqs=1, **{limit: 2})
        http = connect_to(engine)
        response = http.complete(prompt=[5, 6], n=4, max_tokens=9, stream=stream)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["code"] == "queue_full"
        assert (engine.num_queue_full, engine.num_aborts) == (2, 2)
        engine.run()
        engine.check_drained()
        assert http.complete(prompt=[5, 6], n=2, max_tokens=9).status_code == 200

    def test_accepted_samples_are_aborted_when_the_first_is_refused(self, connect_to: Callable[[Any], Any]) -> None:
        engine = ScheduledEngine(refuse_from=0, max_num_seqs=1)
        assert connect_to(engine).complete(prompt=[5, 6], n=3).status_code == 503
        assert engine.num_aborts == 0
        engine.check_drained()

    def test_a_priority_reaches_the_scheduler(self, connect_to: Callable[[Any], Any]) -> None:
        engine = ScheduledEngine(scheduling_policy="priority")
        http = connect_to(engine)
        assert [http.complete(prompt=[5], priority=p).status_code for p in (-(2**31), 2**31 - 1)] == [200, 200]
        assert [arrival.priority for arrival in engine.arrivals] == [-(2**31), 2**31 - 1]
        for wrong in (2**31, -(2**31) - 1):
            error = http.complete(prompt=[5], priority=wrong).json()["error"]
            assert error["param"] == "priority"
            assert error["message"] == f"priority must be an integer from -2147483648 to 2147483647 (got {wrong})"


@pytest.mark.full
class TestOffline:
    def run(self, engine: ScheduledEngine, text_in: TextIn, priorities: list[int] | None = None) -> list[list[int]]:
        """Return the tokens of each prompt's second answer."""
        given = priorities or [0] * len(PROMPTS)
        prompts = self.prompts(engine, text_in, PROMPTS, given)
        samples = [sample for each in prompts for sample in each.samples]
        ended: list[None] = []
        Batch(engine, samples).finish(lambda: ended.append(None))
        outputs = [each.output for each in prompts]
        assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
        assert len(ended) == len(outputs)
        engine.check_drained()
        return [output.outputs[1].token_ids for output in outputs]

    def prompts(
        self, engine: ScheduledEngine, text_in: TextIn, prompts: list[list[int]], priorities: list[int]
    ) -> list[PromptSamples]:
        reading = Reading(engine, text_in, TokenTexts(text_in.tokenizer))
        found = []
        for i, (tokens, priority) in enumerate(zip(prompts, priorities, strict=True)):
            prompt = Prompt(np.array(tokens, np.int32))
            found.append(PromptSamples(reading, f"r{i}", Terms(priority), prompt, PARAMS))
        return found

    @property
    def expected(self) -> list[list[int]]:
        return [expected_tokens(prompt, 9, VOCAB_SIZE) for prompt in PROMPTS]

    @pytest.mark.parametrize("limit", [1, 3, 64])
    def test_a_batch_stays_below_the_queue_limit(self, text_in: TextIn, limit: int) -> None:
        engine = ScheduledEngine(max_num_queued_reqs=limit, max_num_seqs=2, num_blocks=65)
        assert self.run(engine, text_in) == self.expected
        assert engine.num_queue_full == 0

    @pytest.mark.parametrize("limit", thinned([1, 5], keep=1))
    def test_a_refused_request_is_resubmitted(self, text_in: TextIn, limit: int) -> None:
        engine = ScheduledEngine(refuse_from=limit, max_num_seqs=2, num_blocks=65)
        assert self.run(engine, text_in) == self.expected
        assert engine.num_queue_full > 0

    def test_the_best_priority_is_submitted_first_with_priority_scheduling(self, text_in: TextIn) -> None:
        priorities = [i * 7 % 40 - 20 for i in range(40)]
        engine = ScheduledEngine(max_num_queued_reqs=1, max_num_seqs=1, scheduling_policy="priority")
        assert self.run(engine, text_in, priorities) == self.expected
        handed_over = [arrival.priority for arrival in engine.arrivals]
        assert handed_over == sorted(handed_over) and handed_over[0] == -20
        engine = ScheduledEngine(max_num_queued_reqs=1, max_num_seqs=1)
        self.run(engine, text_in, priorities)
        assert [arrival.priority for arrival in engine.arrivals[::2]] == priorities

    def test_a_permanent_refusal_fails_the_call_and_aborts_its_requests(self, text_in: TextIn) -> None:
        engine = ScheduledEngine(max_num_seqs=2, num_blocks=3)
        prompts = self.prompts(engine, text_in, [list(range(3, 3 + length)) for length in (2, 90)], [0, 0])
        batch = Batch(engine, [sample for each in prompts for sample in each.samples])
        with pytest.raises(InvalidRequest) as caught:
            batch.finish(lambda: None)
        assert caught.value.code == "kv_pool_too_small"
        batch.abort()
        engine.run()
        engine.check_drained()


def codes(package: str, call: str, place: int) -> Iterator[str]:
    """Return the string constants at argument ``place`` of all calls of a function in a package."""
    for file in sorted(Path(quire.__file__).parent.joinpath(package).resolve().rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == call:
                argument = node.args[place] if len(node.args) > place else None
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value


@pytest.mark.full
def test_every_error_code_has_a_status() -> None:
    used = {
        *codes("scheduler_proc", "Refusal", 0),
        *codes("scheduler_proc", "Rejected", 1),
        *codes("frontend", "InvalidRequest", 2),
        *codes("launch", "InvalidRequest", 2),
        *codes("protocol", "InvalidRequest", 2),
    }
    assert {"kv_pool_too_small", "loading", "duplicate_request_id", "model_not_found"} <= used
    assert used <= set(STATUS_OF_CODE), used - set(STATUS_OF_CODE)
