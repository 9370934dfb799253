"""Reasons that are recorded with decisions: why a request waits, was preempted, or why blocks were evicted."""

import enum
from typing import NamedTuple


class WaitReason(enum.StrEnum):
    """The limit or event that a waiting request waits for."""

    QUEUED = "queued"
    """It is behind other requests, and its own needs were not checked yet."""
    MAX_NUM_SEQS = "max_num_seqs"
    TOKEN_BUDGET = "token_budget"
    PREFILL_SHARE = "prefill_share"
    WHOLE_PROMPT = "whole_prompt"
    """Without chunked prefill, the whole prompt must fit into the rest of the token budget."""
    KV_BLOCKS = "kv_blocks"
    FULL_SEQUENCE = "full_sequence"
    """The pool has no room for the longest sequence that it may become (``reserve_full_sequence``)."""
    PREEMPTING = "preempting"
    """A request was preempted in this step; admitting more would cause further preemption."""
    RESULT_IN_FLIGHT = "result_in_flight"
    PAUSED = "paused"
    SUSPECT = "suspect"
    """Another request runs alone, because it may be the one that crashes the workers."""
    GRAMMAR = "grammar"
    REMOTE_KV = "remote_kv"
    STREAMING = "streaming"


class PreemptReason(enum.StrEnum):
    """Why a running request was preempted."""

    YOUNGEST = "youngest"
    """Another request needed a block; this one was admitted last."""
    LOWEST_PRIORITY = "lowest_priority"
    OVER_SHARE = "over_share"
    """Another tenant lacked a row or blocks, and this request's tenant has the most of them."""
    ITSELF = "itself"
    """It needed a block, and no other request was left to give one up."""
    BAD_PREFIX = "bad_prefix"
    """It read blocks written by a request whose logits are not finite."""
    SUSPECT = "suspect"
    """Another request must run alone."""
    HELD = "held"
    """Something outside of the scheduler that it needs for its next token is not ready."""
    NEW_EPOCH = "new_epoch"
    """The workers lost their state."""


HOLD_REASONS = (WaitReason.GRAMMAR, WaitReason.REMOTE_KV, WaitReason.STREAMING)


class Decision(NamedTuple):
    """One decision. ``kind``: wait, preempt or evict. ``beneficiary``: id of the request that gains by it, if any."""

    step: int
    kind: str
    request_id: str
    reason: str
    beneficiary: str = ""
    num_blocks: int = 0

    def __str__(self) -> str:
        """Return one line for the log; request ids are quoted, because clients may choose them."""
        what = f"request={self.request_id!r}" if self.request_id else f"num_blocks={self.num_blocks}"
        beneficiary = f" beneficiary={self.beneficiary!r}" if self.beneficiary else ""
        return f"{self.kind} step={self.step} {what} reason={self.reason}{beneficiary}"
