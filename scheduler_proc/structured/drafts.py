"""The drafts of a step, as the workers told them."""

from quire.protocol.wire.worker_messages import Proposed
from quire.scheduler_proc.core.in_flight import InFlightStep, WorkerFault


def has_drafts(record: InFlightStep) -> bool:
    """Whether the masks of a step depend on what its proposer says."""
    return any(row.num_drafts for row in record.constrained)


def drafts_of(record: InFlightStep, proposed: Proposed, vocab_size: int) -> dict[int, list[int]]:
    """Handle → its drafts.

    Raises:
        WorkerFault: they cannot be the drafts of this step.
    """
    handles, counts, tokens = proposed.handles.tolist(), proposed.counts.tolist(), proposed.tokens.tolist()
    if len(handles) != len(counts) or len(set(handles)) != len(handles) or sum(counts) != len(tokens):
        raise WorkerFault(f"drafts of step {record.step}: they do not add up")
    drafts: dict[int, list[int]] = {}
    start = 0
    for handle, count in zip(handles, counts, strict=True):
        row = record.rows.get(handle)
        if row is None or not 0 < count <= row.num_drafts:
            raise WorkerFault(f"drafts of step {record.step}: more than were asked for")
        drafts[handle] = tokens[start : start + count]
        start += count
    if any(not 0 <= token < vocab_size for token in tokens):
        raise WorkerFault(f"drafts of step {record.step}: a token id outside the vocabulary")
    return drafts
