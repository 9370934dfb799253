"""The loop's part in structured outputs: holds requests until their grammar is compiled, and sends bitmasks."""

from collections.abc import Callable
from typing import Any

from quire.protocol.config import EngineConfig
from quire.protocol.wire.codec import Codec
from quire.protocol.wire.front_end_messages import AddRequest
from quire.protocol.wire.worker_messages import Proposed
from quire.scheduler_proc.messages.steps import InFlightStep
from quire.scheduler_proc.process.worker_group import WorkerGroup
from quire.scheduler_proc.requests.events import Consumed, Fail, Hold, Refuse, Release
from quire.scheduler_proc.requests.reasons import WaitReason
from quire.scheduler_proc.scheduler import Scheduler
from quire.scheduler_proc.structured.drafts import has_drafts
from quire.scheduler_proc.structured.manager import GrammarManager
from quire.scheduler_proc.trace.journal import Journal


class Grammars:
    """Connects the GrammarManager, the Scheduler and the workers. Owns the manager and the newest draft tokens.

    Every outcome for a request is an event, which the journal records like one that arrived in a message.
    """

    def __init__(self, config: EngineConfig, journal: Journal, clock: Callable[[], float]) -> None:
        self._manager = GrammarManager(config, clock)
        self._journal = journal
        self._codec: Codec[Any] = Codec(Consumed)
        self._drafts: Proposed | None = None
        self._asked: InFlightStep | None = None
        """The step whose bitmasks are asked for."""

    def fileno(self) -> int:
        """File descriptor that is readable when ``release`` or ``send_inputs`` has something to do."""
        return self._manager.fileno()

    @property
    def has_waiting_requests(self) -> bool:
        """Whether requests wait for a grammar or its bitmasks: ``release`` must then be called periodically."""
        return self._manager.has_waiting_requests

    @property
    def num_invalid_drafts(self) -> int:
        return self._manager.num_invalid_drafts

    def hold(self, scheduler: Scheduler, request: AddRequest, client: int) -> None:
        """Hold a new request until its grammar is compiled, unless the scheduler has refused it or it uses none."""
        if request.sampling.structured_outputs is None or request.pooling is not None:
            return
        if (client, request.request_id) not in scheduler.table.requests:
            return
        if self._manager.begin(client, request):
            self._consume(scheduler, Hold(request.request_id, WaitReason.GRAMMAR), client)

    def release(self, scheduler: Scheduler) -> None:
        """Release or refuse the requests whose grammar compilation has ended."""
        live = scheduler.table.requests
        for client, event in self._manager.poll():
            if (client, event.request_id) in live:
                self._consume(scheduler, event, client)
        self._manager.prune(live)

    def proposed(self, drafts: Proposed) -> None:
        """Store the draft tokens of a step. ``give_inputs`` ignores them unless they are those of the awaited step."""
        self._drafts = drafts

    def send_inputs(self, scheduler: Scheduler, workers: WorkerGroup) -> None:
        """Send the bitmasks that the oldest step awaits. Later steps wait for this message.

        They are asked for when the step's drafts are known, and sent when they are there, in this call or a later one.

        Raises:
            WorkerFault: the draft tokens do not match the step.
        """
        record = scheduler.step_awaiting_inputs
        if record is None or (self._asked is not record and not self._ask(record)):
            return
        found = self._manager.result()
        if found is None:
            return
        self._asked = None
        inputs, events = found
        workers.send(inputs)
        record.awaits_inputs = False
        for client, event in events:
            self._consume(scheduler, event, client)

    @property
    def deadline(self) -> float | None:
        """When ``send_inputs`` must be called next although nothing arrived, or None."""
        return None if self._asked is None else self._manager.deadline()

    def _ask(self, record: InFlightStep) -> bool:
        """Return whether the bitmasks of a step could be asked for."""
        proposed = None
        if has_drafts(record):
            proposed = self._drafts
            # Draft tokens come from the workers in a message of their own. Masks for other drafts than those would
            # allow tokens that the grammar forbids.
            if proposed is None or proposed.step != record.step:
                return False
        self._manager.ask(record, proposed)
        self._asked = record
        return True

    def forget_step(self) -> None:
        """Drop the step that awaits bitmasks, and the stored drafts: no result of the steps in flight will arrive."""
        self._drafts = self._asked = None
        self._manager.abandon()

    def close(self) -> None:
        self._manager.close()

    def _consume(self, scheduler: Scheduler, event: Hold | Release | Refuse | Fail, client: int) -> None:
        scheduler.consume(event, client)
        self._journal.consumed(client, self._codec.encode(0, 0, event), event)
