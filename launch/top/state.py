"""What ``/admin/state`` adds to the metrics: tenants and requests."""

import msgspec

from quire.launch.top.screen import COLUMNS, line_of
from quire.protocol.errors import EngineError

MOST = 8
"""Most tenants, and most requests, that the screen shows."""
TENANT = "  {tenant:text <14}{running:count >10}{waiting:count >10}{kv_blocks:count >10}"
REQUEST = f"{'':16}{{tenant:text >10}}{{seconds:tenths >10}}{{prompt_tokens:count >10}}"
REQUEST += "{output_tokens:count >10}{kv_blocks:count >10}  {shown}  {id}"


class ShownTenant(msgspec.Struct, frozen=True):
    tenant: int
    running: int
    waiting: int
    kv_blocks: int


class ShownRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``reason``: what it waits for. ``seconds``: since its arrival. ``adapter``: the name of its LoRA adapter."""

    id: str
    tenant: int
    state: str
    reason: str | None
    seconds: float
    prompt_tokens: int
    output_tokens: int
    kv_blocks: int
    adapter: str | None = None


class AdminState(msgspec.Struct, frozen=True):
    """The parts that ``quire top`` shows; other fields of the answer are ignored.

    Attributes:
        paused, tenants, requests: the oldest requests; None without an administrator's key.
        admin_error: why they are missing although there is a key.
    """

    paused: str | None = None
    tenants: list[ShownTenant] | None = None
    requests: list[ShownRequest] | None = None
    admin_error: str = ""

    def lines(self) -> list[str]:
        """Return the lines of the screen."""
        found = ["", self.admin_error] if self.admin_error else []
        if self.tenants:
            most = sorted(self.tenants, key=lambda each: (-each.running - each.waiting, each.tenant))
            found += ["", COLUMNS.format("tenants", "running", "waiting", "KV blocks", "").rstrip()]
            found += [line_of(TENANT, msgspec.structs.asdict(each)) for each in most[:MOST]]
            found += [f"  and {len(most) - MOST:,} more"] if len(most) > MOST else []
        if self.requests:
            found += ["", COLUMNS.format("oldest requests", "tenant", "seconds", "prompt", "output") + " KV blocks"]
            for each in self.requests[:MOST]:
                state = each.state if each.reason is None else f"{each.state} ({each.reason})"
                state += f", adapter {each.adapter}" if each.adapter is not None else ""
                found.append(line_of(REQUEST, {**msgspec.structs.asdict(each), "shown": state}))
        return found


def decode_state(text: str) -> AdminState:
    """
    Raises:
        EngineError: the text is no such state.
    """
    try:
        state = msgspec.json.decode(text, type=AdminState)
        if state.tenants is None or state.requests is None:
            raise msgspec.ValidationError("it has no tenants or no requests")
        return state
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise EngineError(f"/admin/state is not in the form of this version: {str(error)[:100]}") from None
