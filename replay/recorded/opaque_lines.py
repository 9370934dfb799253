"""Conversion of trace lines to events without tokens."""

import numpy as np

from quire.protocol.wire.arrays import Int32
from quire.replay.core.opaque import OpaqueRequest, OpaqueResult
from quire.scheduler_proc.trace.lines import Arrival, Result


def opaque_request(line: Arrival, hash_bytes: int) -> OpaqueRequest:
    """Convert an arrival line; ``hash_bytes`` is the length of each hash in it."""
    return OpaqueRequest(
        line.req_id,
        line.num_prompt_tokens,
        line.sampling,
        line.seed,
        line.block_hashes,
        hash_bytes=hash_bytes,
        priority=line.priority,
        arrival=line.arrival,
        num_output_tokens=line.num_output_tokens,
        tenant=line.tenant,
        resubmitted=line.resubmitted,
        forked_from=line.forked_from,
        adapter=line.adapter,
        job_id=line.job_id,
        is_last_step=line.is_last_step,
        pooling=line.pooling,
    )


def opaque_result(line: Result) -> OpaqueResult:
    """Convert a result line without its hashes, which the replay adds before it applies the result."""
    return OpaqueResult(
        line.step,
        _array(line.handles),
        line.ended,
        _array(line.counts),
        _array(line.drafts),
        line.bad,
        line.seconds,
        line.failed,
        line.beams,
    )


def _array(listed: list[int] | None) -> Int32 | None:
    return None if listed is None else np.array(listed, np.int32)
