"""The administrator's routes: pause, resume, resets of the caches, and the engine's state in detail."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.engine.session import controls_of_pause
from quire.frontend.http.schema.errors import ApiError, shorten
from quire.frontend.http.serving.body import json_response, read_body
from quire.frontend.http.serving.row import Row
from quire.frontend.http.serving.server import Server
from quire.protocol.errors import InvalidRequest
from quire.protocol.wire.front_end_messages import PAUSE_MODES, Histogram, RequestState, Statistics

TIMEOUT_S = 5.0


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
    before = await _reset(server, request, "reset_prefix_cache", "hold KV blocks")
    return json_response({"dropped_blocks": before.num_cached_blocks})


async def reset_encoder_cache(server: Server, request: Request) -> Response:
    """Drop the rows of all images, or refuse with 409 while requests need any."""
    before = await _reset(server, request, "reset_encoder_cache", "need rows of the encoder cache")
    return json_response({"dropped_tokens": before.num_encoder_cache_tokens})


async def _reset(server: Server, request: Request, kind: str, using: str) -> Statistics:
    """Reset a cache, and return the statistics before. ``using``: what requests do that prevent it."""
    await query_parameters(request)
    before = await _control(server, "statistics")
    after = await _control(server, kind)
    if not after.done:
        text = f"{after.num_running} requests {using}: pause with mode=wait, and retry when none is running"
        raise ApiError(409, text, None, "requests_running")
    return before


async def engine_state(server: Server, request: Request) -> Response:
    """Return what the engine does now: the oldest requests, and shares from 0 to 1, None before there was any."""
    await query_parameters(request)
    found = await _control(server, "requests")
    now = server.metrics.now()
    used = found.num_usable_blocks - found.num_free_blocks
    parts = {
        "schedule": found.step_schedule,
        "worker": found.step_worker,
        "update": found.step_update,
        "reply": found.step_reply,
    }
    state = {
        "state": server.status,
        "paused": PAUSE_MODES[server.engine.pause_kind],
        "running": found.num_running,
        "waiting": found.num_waiting,
        "waiting_by_reason": found.waiting_by_reason,
        "tenants": [
            {
                "tenant": each.tenant,
                "running": each.num_running,
                "waiting": each.num_waiting,
                "kv_blocks": each.num_blocks,
            }
            for each in found.tenants
        ],
        "requests": [_request_entry(each, now) for each in found.requests],
        "kv_blocks": found.num_usable_blocks,
        "kv_blocks_used": used,
        "kv_blocks_cached": found.num_cached_blocks,
        "kv_use": share(used, found.num_usable_blocks),
        "encoder_cache_tokens": found.encoder_cache_tokens,
        "encoder_cache_tokens_used": found.num_encoder_cache_tokens,
        "prefix_hit_share": share(found.prefix_cache_hit_tokens, found.prefix_cache_queries),
        "preemptions_by_reason": found.preemptions_by_reason,
        "step_parts": {name: _step_part(times) for name, times in parts.items()},
    }
    return json_response(state)


ROUTES = (
    Row("POST", "/admin/pause", pause, query=("mode",)),
    Row("POST", "/admin/resume", resume),
    Row("POST", "/admin/reset_prefix_cache", reset_prefix_cache),
    Row("POST", "/admin/reset_encoder_cache", reset_encoder_cache),
    Row("GET", "/admin/state", engine_state),
)


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


def _pause_state(server: Server, statistics: Statistics) -> dict[str, Any]:
    """Return the counts, and ``paused``: wait or keep, or None if the server admits requests."""
    paused = PAUSE_MODES[server.engine.pause_kind]
    return {"paused": paused, "running": statistics.num_running, "waiting": statistics.num_waiting}


def _request_entry(request: RequestState, now: float) -> dict[str, Any]:
    return {
        "id": request.request_id,
        "tenant": request.tenant,
        "state": request.state,
        "reason": request.reason or None,
        "seconds": round(max(now - request.arrival, 0.0), 3),  # since its arrival
        "prompt_tokens": request.num_prompt_tokens,
        "output_tokens": request.num_output_tokens,
        "kv_blocks": request.num_blocks,
        "preemptions": request.num_preemptions,
        "adapter": request.adapter or None,
    }


def _step_part(times: Histogram | None) -> dict[str, Any]:
    """Return the time of one part of all steps: in all, and the mean of a step."""
    count, total = (0, 0.0) if times is None else (sum(times.counts), times.total)
    return {"count": count, "seconds": total, "mean": share(total, count)}


def share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
