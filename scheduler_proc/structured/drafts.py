"""Validation of the draft tokens that the workers proposed for a step."""

from quire.protocol.wire.worker_messages import Proposed
from quire.scheduler_proc.messages.results import WorkerFault
from quire.scheduler_proc.messages.steps import InFlightStep
from quire.scheduler_proc.structured.backend import Masks


def has_drafts(record: InFlightStep) -> bool:
    """Return whether the bitmasks of a step depend on its draft tokens."""
    return any(row.num_drafts for row in record.constrained)


def num_invalid(drafts: list[int], masks: Masks) -> int:
    """Return how many of an output's drafts its masks forbid, the first such draft and those after it."""
    for at, token in enumerate(drafts):
        if not masks[at, token >> 5] >> (token & 31) & 1:
            return len(drafts) - at
    return 0


def drafts_of(record: InFlightStep, proposed: Proposed, vocab_size: int) -> dict[int, list[int]]:
    """Return the draft tokens by handle.

    Raises:
        WorkerFault: the message does not match the step.
    """
    handles, counts, tokens = proposed.handles.tolist(), proposed.counts.tolist(), proposed.tokens.tolist()
    if len(set(handles)) != len(handles):
        raise WorkerFault(f"drafts of step {record.step}: duplicate handles in {handles[:16]}")
    if len(handles) != len(counts) or sum(counts) != len(tokens):
        sizes = f"{len(handles)} handles, {len(counts)} counts with sum {sum(counts)}, {len(tokens)} tokens"
        raise WorkerFault(f"drafts of step {record.step}: lengths differ: {sizes}")
    drafts: dict[int, list[int]] = {}
    start = 0
    for handle, count in zip(handles, counts, strict=True):
        row = record.rows.get(handle)
        if row is None or not 0 < count <= row.num_drafts:
            raise WorkerFault(f"drafts of step {record.step}: {count} for handle {handle}, more than requested")
        drafts[handle] = tokens[start : start + count]
        start += count
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise WorkerFault(
                f"drafts of step {record.step}: token id {token} outside the vocabulary of {vocab_size} tokens"
            )
    return drafts
