"""The seam between the core and its features: what a feature may do, when it is called, and what it gets to work with.

The core decides steps and knows no feature by name. A feature is one class in ``scheduler_proc/features`` that
overrides the methods of ``Feature`` which concern it; all others cost nothing, because ``Calls`` holds, per method,
only those that override it. Requests in steady decode call no feature at all: what must look at each token of a request
keeps the request out of steady decode (``Request.is_watched``).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from quire.protocol.block_hash import HashChain
from quire.protocol.config import EngineConfig
from quire.protocol.wire.front_end_messages import EndReason, Statistics
from quire.protocol.wire.worker_messages import ModelRunnerOutput, NewRequestData, SchedulerOutput
from quire.scheduler_proc.core.endings import Endings
from quire.scheduler_proc.core.step import Budget, Contents, StepPlan
from quire.scheduler_proc.kv.coordinator import GroupBlocks
from quire.scheduler_proc.messages.results import DueRows, Sampled
from quire.scheduler_proc.messages.steps import InFlightStep, StepRow
from quire.scheduler_proc.requests.reasons import PreemptReason, WaitReason
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.requests.request_table import TableCalls
from quire.scheduler_proc.requests.steady_decode import NEVER
from quire.scheduler_proc.requests.tokens import TokenStore

Handler = Callable[[Any, int], None]
"""Consumes an event of a front end with this index."""


class Reserve(NamedTuple):
    """Free blocks that a waiting request must leave, and why it waits if it lacks them."""

    num_blocks: int
    reason: WaitReason


class Known(NamedTuple):
    """The tokens that a new request begins with.

    Attributes:
        parent: the request from which they were taken.
        check: raises Refusal if the request that was built with them cannot be accepted.
    """

    tokens: TokenStore
    num_prompt_tokens: int
    parent: Request | None = None
    check: Callable[[Request], None] | None = None


class Parts(Protocol):
    """A budget of a step that is divided between requests."""

    def left(self, request: Request) -> int:
        """Return how much of it a request may take."""
        ...

    def take(self, request: Request, num_tokens: int) -> None: ...


class Feature:
    """One capability. Each method is a hook that defaults to nothing.

    A keyframe holds the features' fields under their ``name``, so callbacks apart, everything that decisions depend on
    must be a field, or a ``RequestPart`` of a request.

    Attributes:
        name: attribute of the Scheduler.
        policies: scheduling policies whose rank of requests the feature sets (``RequestQueue.rank``).
        is_enabled: False if no request of this engine can need it: then only ``Calls.ALWAYS`` are called, so that
            steps do not pay for what they do not have.
    """

    name = ""
    policies: tuple[str, ...] = ()
    is_enabled = True

    def consumes(self) -> Mapping[type, Handler]:
        """Return the events that the feature handles, by type. The core does not look at them."""
        return {}

    # ---- arrivals

    def validate(self, event: Any, num_prompt_tokens: int) -> None:
        """Raise Refusal unless the feature's fields of an arrival are valid. Nothing may change."""

    def ends_with_prompt(self, event: Any) -> bool:
        """Whether the answer to an arrival needs no token after its prompt."""
        return False

    def hashing(self, event: Any, chain: Callable[..., HashChain]) -> Callable[..., HashChain]:
        """Return ``BlockHasher.chain`` with what the hashes of an arrival cover besides its tokens."""
        return chain

    def known_tokens(self, event: Any, client: int) -> Known | None:
        """Return the tokens of an arrival that does not bring its own; may raise Refusal."""
        return None

    def check_parent(self, event: Any, parent: Request) -> None:
        """Raise Refusal if an arrival cannot continue the tokens of ``parent``, which it names."""

    def prepare(self, request: Request, event: Any, parent: Request | None) -> None:
        """Set up a request that was built, and is not in the table yet; may raise Refusal.

        If a later feature refuses the request, nothing else is called for it. ``event``: None for a request that a
        feature makes, to compute a part of ``parent``.
        """

    def arrived(self, request: Request, event: Any) -> None:
        """A request was accepted and waits in the queue."""

    def refused(self, request: Request) -> None:
        """A request that was accepted and has no output is rejected; ``ending`` follows."""

    # ---- lists of the table

    def added(self, request: Request) -> None:
        """A request is in the table now, and has its handle."""

    def started(self, request: Request) -> None:
        """A request moved from the queue to ``running``."""

    def stopped(self, request: Request) -> None:
        """A request left ``running``."""

    def pause_reason(self, request: Request) -> WaitReason | None:
        """Return why steps may not compute a running request, or None if they may."""
        return None

    def may_hold(self, request: Request) -> bool:
        """Whether something outside of the scheduler may hold the request."""
        return True

    def stop_waiting(self, request: Request) -> None:
        """Return a request to the queue that the feature holds, because something else will hold it."""

    def released(self, request: Request) -> None:
        """A request is in the queue again, because nothing outside of the scheduler holds it any more."""

    # ---- a step, in the order of its calls

    def budget(self) -> Budget:
        """Return what the feature rations in a step that is planned."""
        raise NotImplementedError

    def claims(self) -> bool:
        """Whether a waiting request may get what running ones have: no row is final before it was considered."""
        return False

    def begin_plan(self, plan: StepPlan) -> None:
        """A step is planned. No request has a row in it yet."""

    def before_rows(self) -> None:
        """Rows of running requests are scheduled next. Those whose last token is in flight do not run any more."""

    def divide(self, plan: StepPlan, prefills: list[Request]) -> Parts | None:
        """Divide the prefill budget."""
        return None

    def most_tokens(self, request: Request) -> int | None:
        """Return how many positions of a running prefill the step may compute at most. It may be preempted here."""
        return None

    def chunk(self, request: Request, begin: int, num_tokens: int, most: int) -> int:
        """Return how many positions from ``begin`` on a prefill may compute in the step: ``num_tokens`` or fewer.

        ``most``: room of the step. More than ``num_tokens``, its part of the step, are possible where fewer are not.
        """
        return num_tokens

    def speculate(self, decodes: list[Request], num_decoding: int, step: int) -> Iterable[int]:
        """Return the number of drafts that each decoding request may have.

        Called for each step, and with the requests outside of steady decode only. The choice must not depend on that.
        ``num_decoding``: how many decode, with those in steady decode.
        """
        return [0] * len(decodes)

    def after_running(self, plan: StepPlan, *, is_paused: bool) -> None:
        """Running requests have their rows. ``is_paused``: no new request may be admitted."""

    def after_waiting(self, plan: StepPlan, *, is_paused: bool) -> None:
        """All rows are final, and hashes of their blocks are published."""

    def give_way(self) -> Iterable[None]:
        """Give way to others, because no request could be computed: an empty step is planned again after each item."""
        return ()

    def sending(self, plan: StepPlan, diff: SchedulerOutput) -> SchedulerOutput:
        """Return the step's diff with the feature's own fields."""
        return diff

    def contents(self, row: StepRow, shared: dict[Any, Contents]) -> Contents | None:
        """Return what a new row holds, if it is known from another one of the step (``shared``)."""
        return None

    def building(self, request: Request, data: NewRequestData) -> NewRequestData:
        """Return the message that builds a request's row on the workers, with the feature's own fields."""
        return data

    def sent(self, row: StepRow, step: int) -> None:
        """A step is sent with drafts in this row."""

    def steady_until(self, request: Request) -> int:
        """Return the step in which a request may need more than one position again, or a past one if it may now."""
        return NEVER

    # ---- admission of a waiting request

    def obstacle(self, request: Request) -> WaitReason | None:
        """Return why a waiting request cannot be admitted, apart from rows, tokens and blocks.

        The feature may hold the request (``RequestTable.hold``); the next one in the queue is then considered.
        """
        return None

    def version(self, request: Request) -> object:
        """Return a value that differs when the feature's part in the answer to ``Planner.admit`` may differ."""
        return None

    def hits(
        self, request: Request, hits: GroupBlocks, num_hit_tokens: int, step_tokens: int
    ) -> WaitReason | int | None:
        """A request has these hits in the prefix cache. Return a reason if it is held; or up to where it may compute.

        ``step_tokens``: most tokens of prefills in a step.
        """
        return None

    def reserve(self, request: Request) -> Reserve | None:
        """Return which free blocks a waiting request must leave to others."""
        return None

    def admit_before(self, plan: StepPlan, head: Request, reason: WaitReason) -> bool:
        """Admit another request than the first one, ``head``, which waits for ``reason``. Returns whether one was."""
        return False

    def admitted(self, request: Request, num_hit_tokens: int, *, is_first: bool) -> None:
        """A request runs now, with this many tokens from the prefix cache. ``is_first``: for the first time."""

    def may_run(self, request: Request) -> bool:
        """Whether the step that is planned may compute a request which was just admitted."""
        return True

    # ---- preemption

    def yields(self, *, others_run: bool) -> bool:
        """Whether blocks that a request lacks will be free without a preemption. ``others_run``: beside it."""
        return False

    def spare(self, candidates: list[Request]) -> tuple[list[Request], PreemptReason | None]:
        """Return which of the running requests may be preempted, at least one, and the reason if this was decisive."""
        return candidates, None

    def over_share(self, candidates: list[Request]) -> list[Request]:
        """Return the candidates of which one should be preempted, because they have more than their share."""
        return []

    def victims(self, request: Request, config: EngineConfig | None = None) -> list[Request]:
        """Return the requests of which ``request`` may preempt one for a row; for its blocks if ``config`` is None."""
        return []

    # ---- results and endings

    def due_rows(self, row: StepRow) -> DueRows | None:
        """Return which rows beside tokens the result must have for a row of a request that generates nothing."""
        return None

    def acknowledged(self, record: InFlightStep, output: ModelRunnerOutput) -> None:
        """A step was answered. Its tokens are not applied yet."""

    def takes(self, request: Request, sampled: Sampled, position: int, endings: Endings) -> bool:
        """Take the tokens of a request, which are then not appended to it. Returns whether they were taken."""
        return False

    def verified(self, request: Request, verified: int, accepted: int) -> None:
        """A result had ``verified`` drafts of a request, of which the first ``accepted`` are tokens now."""

    def applied(self) -> None:
        """A result was applied."""

    def keeps_as(self, request: Request, reason: EndReason) -> int:
        """Return under which number the blocks of a request that ends are kept together; 0 if they are not."""
        return 0

    def ending(self, request: Request) -> None:
        """A request ends and is still in its list of the table, where it must not be held by the feature any more."""

    def ended(self, request: Request) -> None:
        """A request has left the table."""

    # ---- events, epochs and statistics

    def after_event(self) -> None:
        """An event was consumed, or a front end's requests were dropped."""

    def after_step(self, *, is_quiet: bool) -> None:
        """A step was planned. ``is_quiet``: no request could be computed in it."""

    def contents_dropped(self) -> None:
        """All cached contents were dropped by command."""

    def order(self, kind: str) -> bool:
        """Execute a Control of this kind, if the feature knows it. Returns whether it was done."""
        return False

    def before_epoch(self) -> None:
        """The workers died. The steps in flight are known, and dropped after this."""

    def new_epoch(self, *, new_workers: bool) -> bool:
        """All running requests have returned to the queue, and the device's contents were dropped.

        ``new_workers``: what was sent to the old ones will not be answered. Returns whether a request was found to be
        the cause, and has ended.
        """
        return False

    def is_busy(self) -> bool:
        """Whether something was sent to the workers that is not answered."""
        return False

    def describe(self, request: Request) -> dict[str, Any]:
        """Return fields of a request's entry in a listing (``RequestState``)."""
        return {}

    def statistics(self, found: Statistics, *, is_listing: bool) -> Statistics:
        """Return ``found`` with the feature's own fields. ``is_listing``: also those of a listing of requests."""
        return found

    def check(self) -> None:
        """Raise AssertionError unless the feature's invariants hold."""


class Calls(TableCalls):
    """By hook, the features that override it: ``for feature in calls.arrived: feature.arrived(request, event)``.

    So a hook that no feature has costs an empty loop. Made before any feature, because the parts of the core hold it.

    **Order.** Features are called in the order of the Scheduler's list. ``UNWINDS`` are called in the reverse order:
    what was set up last is taken down first.

    Attributes:
        handlers: by type of event, what consumes it.
    """

    ALWAYS = ("validate", "prepare", "statistics", "order", "check")
    UNWINDS = ("ending", "ended", "new_epoch", "after_step")

    def __init__(self) -> None:
        self.handlers: dict[type, Handler] = {}
        self.subscribe(())

    def subscribe(self, features: Sequence[Feature]) -> None:
        for feature in features:
            self.handlers |= feature.consumes()
        for hook in [name for name, value in vars(Feature).items() if callable(value) and name != "consumes"]:
            enabled = [each for each in features if each.is_enabled or hook in self.ALWAYS]
            found = [each for each in enabled if getattr(type(each), hook) is not getattr(Feature, hook)]
            setattr(self, hook, tuple(reversed(found) if hook in self.UNWINDS else found))

    def due_rows_of(self, row: StepRow) -> DueRows | None:
        return next(filter(None, (feature.due_rows(row) for feature in self.due_rows)), None)

    if TYPE_CHECKING:

        def __getattr__(self, hook: str) -> tuple[Feature, ...]: ...
