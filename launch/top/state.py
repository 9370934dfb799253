"""What ``/admin/state`` adds to the metrics: tenants and requests."""

import msgspec

from quire.protocol.errors import EngineError


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
    """The parts that ``quire top`` shows; other fields of the answer are ignored. ``requests``: the oldest ones."""

    paused: str | None
    tenants: list[ShownTenant]
    requests: list[ShownRequest]


_decoder = msgspec.json.Decoder(AdminState)


def decode_state(text: str) -> AdminState:
    """
    Raises:
        EngineError: the text is no such state.
    """
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise EngineError(f"/admin/state is not in the form of this version: {str(error)[:100]}") from None
