"""The bitmasks of steps: what is asked of which helper, what a step waits for, and which requests fail."""

import itertools
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from quire.protocol.config import EngineConfig
from quire.protocol.request.thinking import without_plain
from quire.protocol.wire.worker_messages import SampleInputs
from quire.scheduler_proc.messages.steps import InFlightStep
from quire.scheduler_proc.requests.events import Fail, Hold, Release
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.structured.backend import Masks
from quire.scheduler_proc.structured.cache import CompilingGrammar
from quire.scheduler_proc.structured.drafts import num_invalid
from quire.scheduler_proc.structured.helpers import HelperState, MaskHelpers
from quire.scheduler_proc.structured.limits import (
    MAX_STRIKES,
    PATIENCE_SECONDS,
    PRIVATE_PATIENCE_SECONDS,
    Patience,
    exceeds_limit,
    is_expensive,
)
from quire.scheduler_proc.structured.mask_messages import Begin, Fill, Filled, Forget, FromHelper, Grown, Prepared, Row

Key = tuple[int, str]
"""Client number and request id."""
Events = list[tuple[int, Hold | Release | Fail]]
"""(client, event) for the Scheduler."""

BUSY = "busy"
TOO_SLOW = "the grammar takes too long to match"
TOO_LARGE = "the grammar takes too much memory to match"
CROWDED = "the grammar is expensive to match, and too many such grammars are in use"
_NO_MASKS: Masks = np.zeros((0, 0), np.int32)


@dataclass(slots=True, eq=False)
class Output:
    """One output with a grammar, and what is asked about it.

    Attributes:
        helper: the helper that knows it; None before the first masks, and after the death of a helper.
        num_sent: its tokens (prompt included) that the helper has; -1 before Begin.
        awaits: whether an answer is outstanding; ``ask`` is the number of its message.
        filled: the masks of the newest answer, at ``num_known`` known tokens.
        reason: why the request fails, by the newest answer.
        seconds: CPU time spent on it.
        strikes: helpers that died while they computed it.
        is_expensive: it needs a helper of its own, although its grammar seemed cheap.
    """

    key: Key
    number: int
    grammar: CompilingGrammar
    tenant: int
    helper: HelperState | None = None
    num_sent: int = -1
    request: Request | None = None
    drafts: list[int] = field(default_factory=list)
    awaits: bool = False
    ask: int = 0
    filled: Masks = field(default_factory=lambda: _NO_MASKS)
    num_known: int = -1
    reason: str = ""
    seconds: float = 0.0
    strikes: int = 0
    is_expensive: bool = False

    def leave(self) -> None:
        """Forget the helper. The next one reads all tokens again, which costs as much as it did here."""
        self.helper, self.num_sent, self.seconds = None, -1, 0.0


@dataclass(slots=True)
class _Step:
    """The step that awaits masks.

    Attributes:
        num_rows: its rows, with and without a grammar.
        has_others: some of its rows need no mask of a private helper.
        until: when its rows that could continue stop waiting for those that await the shared helper.
        has_waited: rows that could continue have waited.
    """

    record: InFlightStep
    outputs: list[tuple[Request, Output]]
    num_rows: int
    has_others: bool
    since: float
    until: float
    has_waited: bool = False


class Masking:
    """Owns the outputs with a grammar, and asks the helpers for their masks.

    A step waits for late masks only as long as ``limits.py`` allows. The requests of masks that are later are held:
    they leave the step, and continue when the masks are there. So an expensive grammar delays its own request only.
    """

    def __init__(self, config: EngineConfig, helpers: MaskHelpers) -> None:
        self._config = config
        self._helpers = helpers
        self._outputs: dict[Key, Output] = {}
        self._by_number: dict[int, Output] = {}
        self._numbers = itertools.count(1)
        self._step: _Step | None = None
        self._patience = Patience()
        self.num_invalid_drafts = 0
        self._unsent: dict[int, Output] = {}
        """Outputs whose ask no helper has yet."""
        self._held: set[int] = set()
        """Outputs whose masks were late, so that their requests are held until they are there."""
        self._events: Events = []
        self.refused: list[tuple[CompilingGrammar, str]] = []
        """Grammars that reached a limit, and why later requests are refused."""
        self.prepared: list[tuple[CompilingGrammar, str]] = []
        """Grammars that a helper compiled, or why it did not."""
        self._prune_from = 64

    # ---- outputs

    @property
    def has_held_requests(self) -> bool:
        return bool(self._held)

    def add(self, key: Key, grammar: CompilingGrammar, tenant: int) -> None:
        """Add a request whose grammar was accepted."""
        self.discard(key)
        output = Output(key, next(self._numbers), grammar, tenant)
        self._outputs[key] = self._by_number[output.number] = output

    def discard(self, key: Key) -> None:
        output = self._outputs.pop(key, None)
        if output is not None:
            del self._by_number[output.number]
            self._unsent.pop(output.number, None)
            self._held.discard(output.number)
            if output.helper is not None:
                output.helper.send(Forget([output.number]))

    def prune(self, live: Collection[Key]) -> None:
        """Forget requests that are not among ``live``. Does nothing while there are few and none has its own helper."""
        if len(self._outputs) >= self._prune_from or self._helpers.has_temporary:
            for key in [key for key in self._outputs if key not in live]:
                self.discard(key)
            self._prune_from = max(64, 2 * len(self._outputs))
            outputs = self._outputs.values()
            expensive = {output.grammar.number for output in outputs if self._is_expensive(output)}
            self._helpers.close_unused({output.helper for output in outputs}, expensive)

    # ---- steps

    def ask(self, record: InFlightStep, drafts: dict[int, list[int]], now: float) -> None:
        """Ask for the masks of a step. All tokens before it must be known."""
        requests = [row.request for row in record.constrained if not row.request.status.is_finished]
        outputs = [(request, self._output_of(request)) for request in requests]
        num_private = sum(self._is_expensive(output) for _, output in outputs)
        num_rows = len(record.steady) + sum(row.samples for row in record.rows.values())
        # Patience is computed once per step. A limit that moved with the time would let each late mask extend the wait
        # for the others.
        until = now + self._patience.limit(len(outputs), now)
        self._step = _Step(record, outputs, num_rows, num_rows > num_private, now, until)
        wanted = []
        for request, output in outputs:
            output.request, output.drafts = request, drafts.get(request.handle, [])
            if not output.drafts and output.num_known == len(request.tokens) and not output.awaits:
                continue  # they were late for an earlier step
            output.awaits, output.reason = True, ""
            wanted.append(output)
        self._send(wanted, now)

    def _output_of(self, request: Request) -> Output:
        """Return the output of a request; that of a beam begins here, with the grammar of its leader."""
        key = request.client, request.request_id
        if key not in self._outputs and (leading := request.part_of) is not None:
            leader = self._outputs[leading.client, leading.request_id]
            self.add(key, leader.grammar, leader.tenant)
        return self._outputs[key]

    def abandon(self) -> None:
        """Forget the step that awaits masks: its workers were lost."""
        self._step = None

    def result(self, now: float) -> tuple[SampleInputs, Events] | None:
        """Return the masks of the step and events of its requests, or None while masks are worth waiting for."""
        self.poll(now)
        step = self._step
        assert step is not None
        live = [(request, output) for request, output in step.outputs if not request.status.is_finished]
        awaited = [output for _, output in live if output.awaits]
        has_ready = len(awaited) < step.num_rows - len(step.outputs) + len(live)
        # One late mask delays every row of the step, so that the wait is worth it only while it costs less than what
        # the held request loses.
        if any(now < self._deadline(step, output, has_ready) for output in awaited):
            step.has_waited |= has_ready
            return None
        self._step = None
        if step.has_waited:
            self._patience.record(len(step.outputs), now - step.since)
        events, active = self.take_events(), []
        for request, output in live:
            if output.number not in self._by_number:
                continue  # one of the events is its failure
            if output.awaits:
                # Held and not failed: the request leaves this step only, and continues when its mask is there.
                self._held.add(output.number)
                events.append((request.client, Hold(request.request_id, "grammar")))
            elif fail := self._failure(output):
                events.append((request.client, fail))
            else:
                active.append((request, output.filled[: 1 + len(output.drafts)]))
                self.num_invalid_drafts += num_invalid(output.drafts, output.filled)
                output.num_known = -1  # the token that follows is sampled with them
        return _message(step.record.step, active), events

    def deadline(self, now: float) -> float | None:
        """Return when ``result`` must be called next, or None."""
        step = self._step
        if step is None:
            return None
        times = (step.since + PRIVATE_PATIENCE_SECONDS, step.until, step.since + PATIENCE_SECONDS)
        return next((at for at in times if at > now), now)

    def poll(self, now: float) -> None:
        """Read the helpers' answers."""
        for helper, message in self._helpers.receive(now):
            self._on_message(helper, message)
        for helper in self._helpers.take_dead(now):
            self._on_death(helper, now)
        if self._unsent:
            self._send(list(self._unsent.values()), now)

    def take_events(self) -> Events:
        """Return the events of held requests since the last call."""
        events, self._events = self._events, []
        return events

    def _is_expensive(self, output: Output) -> bool:
        return output.is_expensive or output.grammar.is_expensive

    def _deadline(self, step: _Step, output: Output, has_ready: bool) -> float:
        """Return until when a step waits for an output's masks. ``has_ready``: some of its rows could continue."""
        if self._is_expensive(output):
            return step.since + (PRIVATE_PATIENCE_SECONDS if step.has_others else PATIENCE_SECONDS)
        return step.until if has_ready else step.since + PATIENCE_SECONDS

    def _failure(self, output: Output) -> Fail | None:
        """Return the failure of a request whose answer arrived, if it fails."""
        request = output.request
        assert request is not None
        reason = output.reason
        if not reason and exceeds_limit(output.seconds, request.num_output_tokens, self._config.model.vocab_size):
            reason = TOO_SLOW
        if not reason:
            return None
        if reason in (TOO_SLOW, TOO_LARGE):
            self.refused.append((output.grammar, reason))
        self.discard(output.key)
        return Fail(output.key[1], f"request_failed: {reason}")

    # ---- helpers

    def _send(self, outputs: list[Output], now: float) -> None:
        """Send the outstanding asks of outputs to their helpers; those that no helper can take now are kept."""
        fills: dict[HelperState, Fill] = {}
        for output in outputs:
            self._unsent.pop(output.number, None)
            helper, request = self._helper_of(output, now), output.request
            if not output.awaits or request is None or request.status.is_finished:
                continue
            if helper is None:
                self._unsent[output.number] = output
                continue
            # One message per helper and step, however many rows: the wake-up of the other process costs more than its
            # content.
            fill = fills.get(helper)
            if fill is None:
                fill = fills[helper] = Fill(next(self._numbers), [], [])
            places = helper.take_places(fill.ask, output.number, 1 + len(output.drafts))
            if places is None:
                self._unsent[output.number] = output
                continue
            if output.num_sent < 0:
                self._begin(output, request, helper)
            # Only new tokens are sent. The helper keeps the position of each output; one that replaces a dead helper
            # gets all of them.
            tokens = request.tokens.tail(output.num_sent)
            output.num_sent += len(tokens)
            output.ask = fill.ask
            fill.rows.append(Row(output.number, tokens, output.drafts))
            fill.places.extend(places)
        for helper, fill in fills.items():
            if fill.rows:
                helper.send(fill)

    def _helper_of(self, output: Output, now: float) -> HelperState | None:
        """Return the helper of an output, moving it if needed; None while there is none, or when its request fails."""
        request = output.request
        assert request is not None
        # A grammar that has shown to be expensive moves to a process of its own: in the shared one its masks would
        # delay those of all others.
        if output.helper is not None and output.helper.is_private < self._is_expensive(output):
            output.helper.send(Forget([output.number]))
            output.leave()
        if output.helper is None:
            private = self._is_expensive(output)
            # Refused instead of queued: processes are the bound of what expensive grammars may take, and a queue of
            # them would be as long as clients like.
            if private and not self._helpers.has_room(output.grammar, output.tenant):
                output.awaits, output.reason = False, CROWDED
                self._answered(output)
                return None
            output.helper = self._helpers.helper_for(output.grammar, output.tenant, now, private=private)
        return output.helper

    def _begin(self, output: Output, request: Request, helper: HelperState) -> None:
        helper.prepare(output.grammar)
        prompt = b""
        if self._config.thinking_start_token_ids and self._config.thinking_end_token_ids:
            tokens = request.tokens.array()[: request.num_prompt_tokens]
            prompt = without_plain(tokens, request.sampling.plain_spans).tobytes()
        expects_thought = request.sampling.thinking_token_budget is not None
        helper.send(Begin(output.number, output.grammar.number, prompt, expects_thought))
        output.num_sent = request.num_prompt_tokens

    def _on_message(self, helper: HelperState, message: FromHelper) -> None:
        match message:
            case Prepared():
                accepted = helper.grammars.get(message.grammar)
                if accepted is not None:
                    self.prepared.append((accepted, message.reason))
            case Filled():
                self._on_filled(helper, message)
            case Grown():
                if self._helpers.has_outgrown(helper, message.num_bytes):
                    for output in [o for o in self._outputs.values() if o.helper is helper]:
                        output.awaits, output.reason = False, TOO_LARGE
                        self._answered(output)
            case _:
                pass

    def _on_filled(self, helper: HelperState, message: Filled) -> None:
        given = helper.give_places(message.ask, message.outputs)
        masks = helper.end.masks[list(itertools.chain.from_iterable(given))]
        end = 0
        for number, places in zip(message.outputs, given, strict=True):
            start, end = end, end + len(places)
            output = self._by_number.get(number)
            if output is not None and output.awaits and output.ask == message.ask:
                output.filled = masks[start:end]
                output.awaits, output.reason = False, message.reasons.get(number, "")
                output.seconds += message.seconds
                self._answered(output)

    def _answered(self, output: Output) -> None:
        """Handle an answer: the end of a held request's wait, or a grammar that needs a helper of its own."""
        request = output.request
        if request is None:
            return
        output.num_known = len(request.tokens)
        num_private = self._helpers.num_private(output.tenant)
        if is_expensive(output.seconds, request.num_output_tokens, self._config.model.vocab_size, num_private):
            output.is_expensive = True
        is_held = output.number in self._held
        if not is_held and output.reason != TOO_LARGE:
            return  # the step that awaits it takes the answer
        client, request_id = output.key
        self._held.discard(output.number)
        if fail := self._failure(output):
            self._events.append((client, fail))
        else:
            self._events.append((client, Release(request_id)))

    def prepare(self, grammar: CompilingGrammar, tenant: int, now: float) -> bool:
        """Have a helper compile a grammar, as ``prepared`` reports. Returns False when no helper can take it."""
        if grammar.is_expensive and not self._helpers.has_room(grammar, tenant):
            return False
        helper = self._helpers.helper_for(grammar, tenant, now, private=grammar.is_expensive)
        if helper is None:
            return False
        if grammar.number in helper.grammars and grammar.number not in helper.preparing:
            self.prepared.append((grammar, ""))
        helper.prepare(grammar)
        return True

    def _on_death(self, helper: HelperState, now: float) -> None:
        """Ask others for everything that a dead helper knew. Only the output that it computed alone is suspected."""
        for number in helper.preparing:
            if not self.prepare(helper.grammars[number], helper.tenant, now):
                self.prepared.append((helper.grammars[number], BUSY))
        for output in [o for o in self._outputs.values() if o.helper is helper]:
            output.leave()
            if helper.end.works_on == output.number:
                output.strikes += 1
                output.is_expensive |= output.strikes >= MAX_STRIKES // 2
            if output.strikes >= MAX_STRIKES:
                output.awaits, output.reason = False, TOO_SLOW
                self._answered(output)
            elif output.awaits:
                self._unsent[output.number] = output


def _message(step: int, active: list[tuple[Request, Masks]]) -> SampleInputs:
    if not active:
        return SampleInputs(step, [], [])
    handles = [request.handle for request, _ in active]
    masks = np.concatenate([masks for _, masks in active])
    return SampleInputs(step, handles, [len(masks) for _, masks in active], masks.reshape(-1))
