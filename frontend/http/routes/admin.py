"""The administrator's routes: pause, resume, reset of the prefix cache, and the engine's state in detail."""

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.engine.session import controls_of_pause
from quire.frontend.http.schema.errors import ApiError, shorten
from quire.frontend.http.serving.body import json_response, read_body
from quire.frontend.http.serving.server import Server
from quire.protocol.errors import InvalidRequest
from quire.protocol.wire.front_end_messages import PAUSE_MODES, Histogram, RequestState, Statistics, TenantState

TIMEOUT_S = 5.0


class PauseState(msgspec.Struct, frozen=True):
    """``paused``: wait or keep, or None if the server admits requests."""

    paused: str | None
    running: int
    waiting: int


class CacheReset(msgspec.Struct, frozen=True):
    dropped_blocks: int


class RequestEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One request of the engine. ``seconds``: since its arrival. ``adapter``: the name of its LoRA adapter."""

    id: str
    tenant: int
    state: str
    reason: str | None
    seconds: float
    prompt_tokens: int
    output_tokens: int
    kv_blocks: int
    preemptions: int
    adapter: str | None


class TenantEntry(msgspec.Struct, frozen=True):
    tenant: int
    running: int
    waiting: int
    kv_blocks: int


class StepPart(msgspec.Struct, frozen=True):
    """Time of one part of all steps: ``seconds`` in all, ``mean`` per step."""

    count: int
    seconds: float
    mean: float | None


class DetailedState(msgspec.Struct, frozen=True, kw_only=True):
    """``requests``: the oldest ones. Shares are from 0 to 1; None before there was anything to share."""

    state: str
    paused: str | None
    running: int
    waiting: int
    waiting_by_reason: dict[str, int]
    tenants: list[TenantEntry]
    requests: list[RequestEntry]
    kv_blocks: int
    kv_blocks_used: int
    kv_blocks_cached: int
    kv_use: float | None
    prefix_hit_share: float | None
    preemptions_by_reason: dict[str, int]
    step_parts: dict[str, StepPart]


async def pause(server: Server, request: Request) -> Response:
    """Pause in the mode of the query, and return at once."""
    mode = (await query_parameters(request, "mode")).get("mode", "wait")
    for kind in controls_of_pause(mode):
        statistics = await _control(server, kind)
    return json_response(_pause_state(server, statistics))


async def resume(server: Server, request: Request) -> Response:
    await query_parameters(request)
    return json_response(_pause_state(server, await _control(server, "resume")))


async def reset_prefix_cache(server: Server, request: Request) -> Response:
    """Drop all cached contents, or refuse with 409 while requests hold KV blocks."""
    await query_parameters(request)
    before = await _control(server, "statistics")
    after = await _control(server, "reset_prefix_cache")
    if not after.done:
        text = f"{after.num_running} requests hold KV blocks: pause with mode=wait, and retry when none is running"
        raise ApiError(409, text, None, "requests_running")
    return json_response(CacheReset(before.num_cached_blocks))


async def engine_state(server: Server, request: Request) -> Response:
    await query_parameters(request)
    found = await _control(server, "requests")
    now = server.metrics.now()
    used = found.num_usable_blocks - found.num_free_blocks
    state = DetailedState(
        state=server.status,
        paused=PAUSE_MODES[server.engine.pause_kind],
        running=found.num_running,
        waiting=found.num_waiting,
        waiting_by_reason=found.waiting_by_reason,
        tenants=[_tenant_entry(each) for each in found.tenants],
        requests=[_request_entry(each, now) for each in found.requests],
        kv_blocks=found.num_usable_blocks,
        kv_blocks_used=used,
        kv_blocks_cached=found.num_cached_blocks,
        kv_use=_share(used, found.num_usable_blocks),
        prefix_hit_share=_share(found.prefix_cache_hit_tokens, found.prefix_cache_queries),
        preemptions_by_reason=found.preemptions_by_reason,
        step_parts={
            "schedule": _step_part(found.step_schedule),
            "worker": _step_part(found.step_worker),
            "update": _step_part(found.step_update),
            "reply": _step_part(found.step_reply),
        },
    )
    return json_response(state)


async def query_parameters(request: Request, *allowed: str) -> dict[str, str]:
    """Return the query's parameters. What has no effect is refused, so that an order is never half understood.

    Raises:
        InvalidRequest: an unknown parameter, one that occurs twice, or a body.
    """
    given = request.query_params.multi_items()
    names = [name for name, _ in given]
    for name in names:
        if name not in allowed or names.count(name) > 1:
            known = f"the query may have {' and '.join(allowed)}, once" if allowed else "this path has no parameters"
            raise InvalidRequest(f"unknown or repeated parameter {shorten(name)}: {known}", name, "unknown_parameter")
    if await read_body(request):
        raise InvalidRequest("the request must have no body: parameters are in the query, such as ?mode=keep")
    return dict(given)


async def _control(server: Server, kind: str) -> Statistics:
    """Send a control to the scheduler and return its answer.

    Raises:
        EngineError: the engine has failed.
        ApiError: 503, no answer in time, because the scheduler is loading or was replaced.
    """
    try:
        return await asyncio.wait_for(server.engine.control(kind), TIMEOUT_S)
    except TimeoutError:
        text = f"the scheduler has not answered in {TIMEOUT_S:g} s (state: {server.engine.state}): retry later"
        raise ApiError(503, text, None, "engine_unavailable") from None


def _pause_state(server: Server, statistics: Statistics) -> PauseState:
    return PauseState(PAUSE_MODES[server.engine.pause_kind], statistics.num_running, statistics.num_waiting)


def _tenant_entry(tenant: TenantState) -> TenantEntry:
    return TenantEntry(tenant.tenant, tenant.num_running, tenant.num_waiting, tenant.num_blocks)


def _request_entry(request: RequestState, now: float) -> RequestEntry:
    return RequestEntry(
        id=request.request_id,
        tenant=request.tenant,
        state=request.state,
        reason=request.reason or None,
        seconds=round(max(now - request.arrival, 0.0), 3),
        prompt_tokens=request.num_prompt_tokens,
        output_tokens=request.num_output_tokens,
        kv_blocks=request.num_blocks,
        preemptions=request.num_preemptions,
        adapter=request.adapter or None,
    )


def _step_part(times: Histogram | None) -> StepPart:
    count, total = (0, 0.0) if times is None else (sum(times.counts), times.total)
    return StepPart(count, total, total / count if count else None)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
