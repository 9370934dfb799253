"""AdapterState: the scheduler's state of one LoRA adapter, to which its requests refer."""

from dataclasses import dataclass, field

from quire.protocol.wire.adapter_messages import AdapterRef
from quire.scheduler_proc.requests.request import Request, RequestPart


@dataclass(slots=True, eq=False, repr=False)
class AdapterState:
    """One adapter.

    Attributes:
        number: identifies it in messages to the workers.
        ref: name, digest and folder, as in its newest request.
        slot: slot of the device that holds it, or to which it is being loaded; -1 without one.
        is_loading: a load to the slot is not answered.
        is_cached: the workers have a copy in host memory, or will have one after the load.
        is_active: it has a turn: steps compute its requests.
        num_requests: requests that have not ended.
        running: by handle, its running requests, with a turn or without.
        held: by handle, requests that are held until it is loaded.
        last_step: newest step that uses it, as far as it has no running request and no turn.
        turn_began: first step of its turn.
        last_turn: steps of its last turn, if that ended with running requests; otherwise 0.
        num_turn_steps: steps of its turns since it was loaded, or had no request, without the present one.
        awaits_first_token: while it waits for a turn: a running request of it had no token in flight when it began to
            wait.
    """

    number: int
    ref: AdapterRef
    slot: int = -1
    is_loading: bool = False
    is_cached: bool = False
    is_active: bool = False
    num_requests: int = 0
    running: dict[int, Request] = field(default_factory=dict)
    held: dict[int, Request] = field(default_factory=dict)
    last_step: int = 0
    turn_began: int = 0
    last_turn: int = 0
    num_turn_steps: int = 0
    awaits_first_token: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether a slot holds it, so that steps can use it."""
        return self.slot >= 0 and not self.is_loading

    @property
    def is_in_use(self) -> bool:
        """Whether the next step may use it."""
        return self.is_active and bool(self.running)

    @property
    def place(self) -> str:
        """Where it is, for statistics: active, ready, loading, host or absent."""
        if self.slot >= 0:
            return "loading" if self.is_loading else ("active" if self.is_in_use else "ready")
        return "host" if self.is_cached else "absent"

    def __repr__(self) -> str:
        return f"AdapterState({self.number}, {self.ref.name!r}, {self.place}, slot {self.slot})"


ADAPTER = RequestPart[AdapterState | None]("adapter", None)
ADAPTER_NAME = RequestPart("adapter_name", "")
"""The name by which the client of a request asked for its adapter."""
