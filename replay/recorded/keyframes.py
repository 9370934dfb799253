"""The start of a replay in the middle of a run."""

from collections.abc import Callable

from quire.protocol.wire.arrays import NO_TOKENS
from quire.protocol.wire.front_end_messages import AddRequest
from quire.replay.core.opaque import OpaqueTokens
from quire.scheduler_proc.requests.reasons import Decision
from quire.scheduler_proc.scheduler import Scheduler
from quire.scheduler_proc.trace.lines import Arrival, Keyframe
from quire.scheduler_proc.trace.snapshot_reader import continue_from


def begin_at(scheduler: Scheduler, line: Keyframe, arrived: Callable[[Arrival, list[Decision]], None] | None) -> None:
    """Bring an unused scheduler to a keyframe, and call ``arrived`` for each of its requests.

    Raises:
        ValueError, TypeError, LookupError: the state is impossible.
    """
    if line.snapshot is None:
        raise ValueError("invalid keyframe: it has no state")
    size = scheduler.kv.block_size
    continue_from(scheduler, line.snapshot, make_tokens=lambda _, count, names: OpaqueTokens(count, size, names))
    for request in scheduler.table.requests.values():
        if arrived is not None and request.client >= 0:  # a beam has no arrival
            arrived(
                Arrival(
                    now=line.now,
                    client=request.client,
                    request=AddRequest(
                        request.request_id, NO_TOKENS, request.sampling, request.seed, priority=request.priority
                    ),
                    num_prompt_tokens=request.num_prompt_tokens,
                    num_output_tokens=request.num_output_tokens,
                ),
                [],
            )
