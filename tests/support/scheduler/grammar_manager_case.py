"""A GrammarManager without an engine: manual clock, helpers in the test's process, a gate instead of the guard."""

import select
import threading
import time
from typing import Any

import numpy as np
from grammar_cases import demo_backend, demo_config, tokens_of
from inline_helpers import InlineHelpers
from scheduler_driver import make_request

from quire.protocol.config import EngineConfig
from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.protocol.wire.front_end_messages import AddRequest
from quire.protocol.wire.worker_messages import SampleInputs
from quire.scheduler_proc.messages.steps import InFlightStep, StepRow
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.requests.tokens import Tokens
from quire.scheduler_proc.structured.drafts import Proposed
from quire.scheduler_proc.structured.manager import Events, GrammarManager

PROMPT = [3, 4, 5]
WAIT_S = 60.0


def sample_inputs(
    manager: GrammarManager, record: InFlightStep, proposed: Proposed | None = None
) -> tuple[SampleInputs, Events]:
    """Ask for the bitmasks of a step, and wait for them, as the scheduler's loop does between other work."""
    manager.ask(record, proposed)
    deadline = time.monotonic() + WAIT_S
    while (found := manager.result()) is None:
        assert time.monotonic() < deadline, "the masks do not come"
        select.select([manager], [], [], 0.001)
    return found


class Gate:
    """Replaces the guard: lets compilations through one by one, or all."""

    def __init__(self, *, opened: bool) -> None:
        self.waiting = threading.Semaphore(1000 if opened else 0)
        self.checked: list[StructuredOutputs] = []
        self.num_bytes: dict[str, int] = {}
        """Memory of the compiled regular expressions that take some."""
        self.starts = threading.Event()
        self.starts.set()

    def start(self) -> None:
        self.starts.wait()

    def check(self, wanted: StructuredOutputs, cpu_seconds: float) -> int:
        self.waiting.acquire()
        self.checked.append(wanted)
        return self.num_bytes.get(str(wanted.regex), 0)

    def close(self) -> None:
        pass


class SlowBackend:
    """The demo's backend, but rows of expressions with a z take 50 ms of the case's clock."""

    def __init__(self, case: "Case") -> None:
        self._case = case
        self._slow: set[int] = set()

    def compile(self, wanted: StructuredOutputs) -> Any:
        compiled = demo_backend().compile(wanted)
        if "z" in (wanted.regex or ""):
            make_matcher = compiled.matcher

            def matcher() -> Any:
                self._slow.add(id(found := make_matcher()))
                return found

            compiled.matcher = matcher  # type: ignore[method-assign]
        return compiled

    def fill(self, matchers: Any, masks: Any) -> None:
        self._case.now += 0.05 * sum(id(matcher) in self._slow for matcher, _ in matchers)
        demo_backend().fill(matchers, masks)


class Case:
    """A manager with a manual clock."""

    def __init__(self, *, opened: bool = True, **settings: Any) -> None:
        self.now = 0.0
        self.gate = Gate(opened=opened)
        self.helpers: InlineHelpers
        self.manager = GrammarManager(demo_config(**settings), lambda: self.now, self._make_helpers, lambda: self.gate)

    def _make_helpers(self, config: EngineConfig) -> InlineHelpers:
        def clock() -> float:
            return self.now

        self.helpers = InlineHelpers(config, lambda: SlowBackend(self), clock)
        return self.helpers

    def outcomes(self) -> list[tuple[int, Any]]:
        """Wait for the pipe, and return the outcomes of ``poll``."""
        assert select.select([self.manager], [], [], 30)[0]
        return self.manager.poll()

    def decide(self) -> list[tuple[int, Any]]:
        """Return the outcomes of all waiting requests."""
        outcomes: list[tuple[int, Any]] = []
        deadline = time.monotonic() + WAIT_S
        while self.manager.has_waiting_requests:
            assert time.monotonic() < deadline, "requests still wait for their grammars"
            outcomes += self.manager.poll()
            select.select([self.manager], [], [], 0.01)
        return outcomes

    def result(self) -> Any:
        """Return the result of a step, as the loop does when a helper has answered."""
        found = self.manager.result() or self.manager.result()
        assert found is not None, "the step still waits"
        return found

    def close(self) -> None:
        self.gate.starts.set()
        self.gate.waiting.release(1000)
        self.manager.close()


def arrival(request_id: str, **wanted: Any) -> AddRequest:
    return make_request(request_id, PROMPT, structured_outputs=StructuredOutputs(**wanted))


def constrained(request_id: str, output: str = "", **wanted: Any) -> Request:
    """Return a running request with ``output`` after its prompt."""
    event = arrival(request_id, **wanted)
    tokens = Tokens(np.array([*PROMPT, *tokens_of(output)], np.int32), None)
    return Request(
        client=0,
        request_id=request_id,
        tokens=tokens,
        num_prompt_tokens=len(PROMPT),
        sampling=event.sampling,
        seed=0,
        stop_tokens=frozenset(),
        max_total_tokens=100,
        handle=int(request_id),
    )


def step_of(*requests: Request, drafts: int = 0) -> InFlightStep:
    rows = {r.handle: StepRow(r, 1 + drafts, (), drafts, samples=True) for r in requests}
    return InFlightStep(7, rows, [], len(requests) * (1 + drafts), only_steady=False, awaits_inputs=True)


def ready(case: Case, *requests: Request) -> None:
    for request in requests:
        event = make_request(request.request_id, PROMPT, structured_outputs=request.sampling.structured_outputs)
        if case.manager.begin(0, event):
            case.decide()
