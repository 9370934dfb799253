"""The processes that compute masks: same masks as in this process, and replacements for those that die or stop."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from engine_processes import engine_processes
from grammar_cases import demo_backend, demo_config, tokens_of
from grammar_manager_case import constrained, make_request, sample_inputs, step_of
from tiers import thinned
from waits import wait_for

from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.protocol.wire.worker_messages import Proposed
from quire.scheduler_proc.requests.events import Hold
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.structured import helpers, limits, masking
from quire.scheduler_proc.structured.helper_process import MaskProcesses
from quire.scheduler_proc.structured.manager import GrammarManager

PROCESS = "quire.scheduler_proc.structured.mask_process"
SCHEMA = {
    "type": "object",
    "properties": {"ab": {"type": "integer"}},
    "required": ["ab"],
    "additionalProperties": False,
}
TEXT = '{"ab": 12}'
PATIENCE_S = 60.0


class Open:
    """Lets every grammar pass, as one that takes ``num_bytes`` of memory."""

    num_bytes = 0

    def start(self) -> None: ...

    def check(self, wanted: StructuredOutputs, cpu_seconds: float) -> int:
        return self.num_bytes

    def close(self) -> None: ...


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarManager]:
    for module in (masking, limits):  # the machine may be busy
        monkeypatch.setattr(module, "PATIENCE_SECONDS", PATIENCE_S)
    manager = GrammarManager(demo_config(), time.monotonic, make_check=Open)
    before = set(engine_processes(PROCESS))
    yield manager
    manager.close()
    assert not psutil.wait_procs(set(engine_processes(PROCESS)) - before, timeout=10)[1]


def ready(manager: GrammarManager, request: Request) -> None:
    event = make_request(request.request_id, [3, 4, 5], structured_outputs=request.sampling.structured_outputs)
    waits = manager.begin(0, event)
    deadline = time.monotonic() + PATIENCE_S
    while waits and manager.has_waiting_requests:
        assert time.monotonic() < deadline
        manager.poll()
        select.select([manager], [], [], 0.05)


def masks_along(manager: GrammarManager, disturb: Callable[[int], None] = lambda at: None) -> list[list[int]]:
    """Return the masks at each token of TEXT; ``disturb`` is called before each."""
    request = constrained("1", json=SCHEMA)
    ready(manager, request)
    found = []
    for at, token in enumerate([*tokens_of(TEXT), 0]):
        disturb(at)
        inputs, failures = sample_inputs(manager, step_of(request))
        assert not failures and inputs.bitmask is not None
        found.append(inputs.bitmask.tolist())
        request.tokens.append(token)
    return found


def masks_here() -> list[list[int]]:
    backend = demo_backend()
    matcher = backend.compile(StructuredOutputs(json=SCHEMA)).matcher()
    found = []
    for token in [*tokens_of(TEXT), 0]:
        masks = np.zeros((1, 32), np.int32)
        backend.fill([(matcher, 0)], masks)
        found.append(masks[0].tolist())
        matcher.accept(token)
    return found


def signalled(number: signal.Signals, generation: str) -> Callable[[int], None]:
    """Return a function that signals the processes before every third mask."""

    def send(at: int) -> None:
        if at % 3 == 1:
            own = [p for p in engine_processes(PROCESS) if p.ppid() == os.getpid()]
            targets = own if generation == "parent" else [child for parent in own for child in parent.children()]
            for process in targets:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)

    return send


@pytest.mark.parametrize("generation", thinned(["parent", "child"], keep=1))
def test_killed_processes_are_replaced_and_the_masks_are_the_same(manager: GrammarManager, generation: str) -> None:
    assert masks_along(manager, signalled(signal.SIGKILL, generation)) == masks_here()


@pytest.mark.parametrize("where", ["helper", "parent"])
def test_a_helper_that_cannot_be_opened_leaves_no_descriptors(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = MaskProcesses(demo_config())
    if where == "helper":
        processes.open(private=False).close()
        monkeypatch.setattr(socket, "send_fds", _refuse)
    else:
        monkeypatch.setattr(subprocess, "Popen", _refuse)
    before = psutil.Process().num_fds()
    with pytest.raises(OSError, match="refused by the test") as refused:
        processes.open(private=False)
    assert psutil.Process().num_fds() == before, refused  # which would keep them open
    monkeypatch.undo()
    processes.open(private=False).close()
    processes.close()


def _refuse(*_: object, **__: object) -> None:
    raise OSError("refused by the test")


@pytest.mark.full
@pytest.mark.parametrize("generation", ["child", "parent"])
def test_stopped_processes_are_replaced_and_the_masks_are_the_same(
    manager: GrammarManager, generation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helpers, "STALLED_SECONDS", 0.5)
    assert masks_along(manager, signalled(signal.SIGSTOP, generation)) == masks_here()


def test_drafts_and_long_messages(manager: GrammarManager) -> None:
    """More rows than the kernel buffers in a socket, with drafts whose masks equal those of known tokens."""
    requests = [constrained(str(i + 1), regex="[ab]{2,4}") for i in range(20)]
    for request in requests:
        ready(manager, request)
    drafts = [*tokens_of("a"), *tokens_of("b")]
    count = len(requests)
    handles, counts = np.array([r.handle for r in requests], np.int32), np.full(count, 2, np.int32)
    with_places = Proposed(7, handles, counts, np.array(drafts * count, np.int32))
    inputs, failures = sample_inputs(manager, step_of(*requests[:4], drafts=2), _some(with_places, 4))
    assert inputs.counts == [3] * 4 and not failures
    assert inputs.bitmask is not None
    found = inputs.bitmask.reshape(4, 3, -1).tolist()
    for at in range(3):
        one = constrained("1", "", regex="[ab]{2,4}")
        ready(manager, one)
        for token in drafts[:at]:
            one.tokens.append(token)
        expected, _ = sample_inputs(manager, step_of(one))
        assert expected.bitmask is not None
        assert all(rows[at] == expected.bitmask.tolist() for rows in found)


def _some(proposed: Proposed, count: int) -> Proposed:
    return Proposed(7, proposed.handles[:count], proposed.counts[:count], proposed.tokens[: 2 * count])


def test_the_helper_of_an_expensive_request_ends_with_it(
    manager: GrammarManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Open, "num_bytes", limits.EXPENSIVE_BYTES + 1)
    request = constrained("1", json={"type": "integer", "multipleOf": 1009})
    ready(manager, request)
    assert sample_inputs(manager, step_of(request))[0].handles == [1]
    own = [p for p in engine_processes(PROCESS) if p.ppid() != os.getpid()]
    assert [os.sched_getscheduler(process.pid) for process in own] == [os.SCHED_IDLE]
    manager.prune(set())
    assert not psutil.wait_procs(own, timeout=10)[1]


def test_a_late_mask_comes_later(manager: GrammarManager, monkeypatch: pytest.MonkeyPatch) -> None:
    request = constrained("1", json=SCHEMA)
    ready(manager, request)
    monkeypatch.setattr(masking, "PATIENCE_SECONDS", 0.0)
    children = [p for p in engine_processes(PROCESS) if p.ppid() != os.getpid()]
    for child in children:
        child.suspend()
    manager.ask(step_of(request))
    found: Any = manager.result()
    assert found[1] == [(0, Hold("1", "grammar"))]
    for child in children:
        child.resume()
    wait_for(lambda: manager.poll() is not None and not manager.has_waiting_requests)
    inputs, failures = sample_inputs(manager, step_of(request))
    assert inputs.bitmask is not None and inputs.bitmask.tolist() == masks_here()[0] and not failures
