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
    RESULT_SIZE = "result_size"
    """The vectors or routed experts of its tokens must fit into the rest of the step's result."""
    KV_BLOCKS = "kv_blocks"
    KV_PRESSURE = "kv_pressure"
    """Too many blocks are used for another admission (``kv_pressure_high``)."""
    FULL_SEQUENCE = "full_sequence"
    """The pool has no room for the longest sequence that it may become (``reserve_full_sequence``)."""
    PROGRAM_LIMIT = "program_limit"
    """The free blocks have contents of admitted programs, and a request of another program runs already."""
    PREEMPTING = "preempting"
    """A request was preempted in this step; admitting more would cause further preemption."""
    RESULT_IN_FLIGHT = "result_in_flight"
    PAUSED = "paused"
    SUSPECT = "suspect"
    """Another request runs alone, because it may be the one that crashes the workers."""
    GRAMMAR = "grammar"
    LOADING = "loading"
    """Blocks of its prompt are copied from host memory or disk."""
    FORK = "fork"
    """The request that it was forked from has not computed their common tokens, or there is no row or block for it."""
    BEAMS = "beams"
    """It is the request of a beam search, or a beam with a result, and the search has not continued yet."""
    ADAPTER = "adapter"
    """Its LoRA adapter is not loaded."""
    ADAPTER_TURN = "adapter_turn"
    """It was admitted, and other adapters have their turn; only in decisions, because it runs."""
    ENCODER = "encoder"
    """The rows of an image of its prompt are not computed, or lack room in the encoder cache."""
    REMOTE_KV = "remote_kv"
    STREAMING = "streaming"


class PreemptReason(enum.StrEnum):
    """Why a running request was preempted."""

    LEAST_LOSS = "least_loss"
    """Another request needed a block; this one has the fewest tokens to compute again."""
    YOUNGEST = "youngest"
    """This one was admitted last: only in replays that imitate an engine with this rule."""
    LOWEST_PRIORITY = "lowest_priority"
    LAST_PROGRAM = "last_program"
    """Another request needed a block; this one belongs to a program that is not admitted, or to the youngest one."""
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
    JOINS_LOAD = "joins_load"
    """It has computed its part of its cached prefix, and continues behind the part that is loaded."""
    NEW_EPOCH = "new_epoch"
    """The workers lost their state."""


HOLD_REASONS = (WaitReason.GRAMMAR, WaitReason.REMOTE_KV, WaitReason.STREAMING)
LASTING_REASONS = (WaitReason.MAX_NUM_SEQS, WaitReason.KV_BLOCKS, WaitReason.PROGRAM_LIMIT, WaitReason.FULL_SEQUENCE)
"""They depend on rows and blocks, and not on which prefills a step has."""
KEPT_REASONS = (*LASTING_REASONS, WaitReason.ENCODER)
"""They last until what ``Planner.admission_obstacle`` compares has changed."""
RUNNING_REASON = WaitReason.ADAPTER_TURN
"""Only running requests wait for it."""
RESERVED_REASONS = (WaitReason.REMOTE_KV, WaitReason.STREAMING)
"""Nothing produces them yet (docs/reserved.md), so statistics have them only if a request waits for one."""


class Decision(NamedTuple):
    """One decision. ``kind``: wait, preempt, evict, store, choose, pin, unpin, or program (admitted or released).

    ``beneficiary``: id of the request that gains by it, if any. ``num_blocks``: blocks that are evicted, stored, or
    loaded meanwhile. The reason of a store is the tier; that of a choice is what was chosen, that of a pin the tool.
    ``num_tokens``: computed positions of a preempted request. ``detail``: figures. Both are not in traces, because a
    replay gives them.
    """

    step: int
    kind: str
    request_id: str
    reason: str
    beneficiary: str = ""
    num_blocks: int = 0
    num_tokens: int = 0
    detail: str = ""

    def __str__(self) -> str:
        """Return one line for the log; request ids are quoted, because clients may choose them."""
        what = f"request={self.request_id!r}" if self.request_id else ""
        what += f" num_blocks={self.num_blocks}" if self.num_blocks else ""
        what += f" num_tokens={self.num_tokens}" if self.num_tokens else ""
        beneficiary = f" beneficiary={self.beneficiary!r}" if self.beneficiary else ""
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.kind} step={self.step} {what.strip()} reason={self.reason}{beneficiary}{detail}"
