"""What grammars are to a turn of the loop: requests that are held and released, and the masks that steps wait for."""

from collections.abc import Callable
from typing import Any

from quire.protocol.config import EngineConfig
from quire.protocol.wire.codec import Codec
from quire.protocol.wire.front_end_messages import AddRequest
from quire.protocol.wire.worker_messages import Proposed
from quire.scheduler_proc.core.events import Consumed, Fail, Hold, Refuse, Release
from quire.scheduler_proc.core.scheduler import Scheduler
from quire.scheduler_proc.process.worker_group import WorkerGroup
from quire.scheduler_proc.structured.drafts import has_drafts
from quire.scheduler_proc.structured.manager import GrammarManager
from quire.scheduler_proc.trace.journal import Journal


class Grammars:
    """Brings the GrammarManager, the Scheduler and the workers together; owns the first, and the newest drafts.

    What becomes of a request is an event, which the journal hears of like one that came over a wire.
    """

    def __init__(self, config: EngineConfig, journal: Journal, clock: Callable[[], float]) -> None:
        self._manager = GrammarManager(config, clock)
        self._journal = journal
        self._codec: Codec[Any] = Codec(Consumed)
        self._proposed: Proposed | None = None

    def fileno(self) -> int:
        """Readable when ``release`` has something to do."""
        return self._manager.fileno()

    @property
    def has_waiting_requests(self) -> bool:
        """A grammar is being compiled: ``release`` is to be called every now and then."""
        return self._manager.has_waiting_requests

    def hold(self, scheduler: Scheduler, request: AddRequest, client: int) -> None:
        """A request that has just come waits until its grammar is compiled; one that was refused does not."""
        if request.sampling.structured_outputs is None or (client, request.request_id) not in scheduler.table.requests:
            return
        if self._manager.begin(client, request):
            self._consume(scheduler, Hold(request.request_id, "grammar"), client)

    def release(self, scheduler: Scheduler) -> None:
        """Those whose grammars are ready, or never will be."""
        live = scheduler.table.requests
        for client, event in self._manager.poll():
            if (client, event.request_id) in live:
                self._consume(scheduler, event, client)
        self._manager.prune(live)

    def proposed(self, drafts: Proposed) -> None:
        """Of a step before, perhaps: then they are not asked for."""
        self._proposed = drafts

    def give_inputs(self, scheduler: Scheduler, workers: WorkerGroup) -> None:
        """The masks that the oldest step waits for, if it does and its drafts are known. No step is sent before.

        Raises:
            WorkerFault: its drafts cannot be what the workers were asked for.
        """
        record = scheduler.step_awaiting_inputs
        if record is None:
            return
        proposed = None
        if has_drafts(record):
            proposed = self._proposed
            if proposed is None or proposed.step != record.step:
                return
        inputs, failures = self._manager.sample_inputs(record, proposed)
        workers.send(inputs)
        record.awaits_inputs = False
        for client, fail in failures:
            self._consume(scheduler, fail, client)

    def forget_drafts(self) -> None:
        """Nothing in flight will be answered any more."""
        self._proposed = None

    def close(self) -> None:
        self._manager.close()

    def _consume(self, scheduler: Scheduler, event: Hold | Release | Refuse | Fail, client: int) -> None:
        scheduler.consume(event, client)
        self._journal.consumed(client, self._codec.encode(0, 0, event), event)
