"""The interface of logits processors: what one is told of the batch, and what it may do to its logits.

Plain Python, so that a front end can ask a plugin about parameters without starting a device. Names, order of
operations and the interface follow the design that vLLM's users know (``LogitsProcessor``, ``BatchUpdate``), except
that the order removed → added → moved holds everywhere, and that any sequence of updates leaves the state that building
afresh would give.
"""

import enum
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

from quire.protocol.config import EngineConfig
from quire.protocol.request.sampling_params import SamplingParams

T = TypeVar("T")
Tensor: TypeAlias = Any
"""A torch.Tensor; and ``Device`` a torch.device. This layer does not import torch."""
Device: TypeAlias = Any


class MoveDirectionality(enum.Enum):
    """UNIDIRECTIONAL: the first row's request is in the second row now, the first row is empty. SWAP: both moved."""

    UNIDIRECTIONAL = enum.auto()
    SWAP = enum.auto()


class AddedRequest(NamedTuple):
    """A request that took a row.

    Attributes:
        row: its own, from 0.
        prompt_token_ids: its prompt; not to be changed.
        output_token_ids: the running answer, a live reference: it has every token so far whenever ``apply`` is called.
    """

    row: int
    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]


class MovedRequest(NamedTuple):
    """A request that changed rows, or two that did."""

    source: int
    target: int
    directionality: MoveDirectionality


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """How the rows of the batch changed since the last update. Applied in this order: removed, added, moved.

    A row that is freed and filled again in one update is an addition alone.

    Attributes:
        batch_size: rows after the update.
        removed: rows that were freed, in falling order, as numbered before any move.
        added: requests that took a row. One in a row that had another request replaces it.
        moved: in the order in which they happened.
    """

    batch_size: int
    removed: Sequence[int]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Changes the logits of some rows of a batch, before their tokens are sampled.

    What an instance keeps per request, it keeps by row, and follows the batch by ``update_state``. It should be a
    function of what it was told and of the lists it was given, for it may be replaced: once one has raised, or returned
    nonsense, a fresh one is told the whole batch as added, and each row is tried alone to find the request that fails.
    """

    @classmethod  # noqa: B027  (by default there is nothing to refuse)
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Look at a request before it is accepted.

        Raises:
            ValueError: it asks this processor for what it cannot do; the text goes to the client.
        """

    @abstractmethod
    def __init__(self, config: EngineConfig, device: Device, is_pin_memory: bool) -> None:
        """``device``: of the logits. ``is_pin_memory``: whether host memory is worth pinning for copies to it."""

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """The logits to go on with; may be the same tensor, changed in place.

        Called for each token that is sampled, and, where there are drafts, once per draft more: the answers have the
        drafts before it meanwhile.

        Args:
            logits: float32 ``[batch_size, vocab_size]``, row ``i`` of the request in row ``i``. Rows that sample
                nothing in this step are there too, and what becomes of them has no effect.
        """

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether it never changes which token of a row is the best: then greedy requests go without it."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """How the batch changed; None where it did not. Before each ``apply``; a step that samples nothing has none."""


def apply_update(
    entries: dict[int, T],
    update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int], list[int]], T | None],
) -> bool:
    """Let a dictionary of row → state follow the batch; true when it changed.

    Args:
        new_state: of a request's parameters, prompt and live answer; None: it has no state here.
    """
    if update is None:
        return False
    changed = False
    for row in update.removed:
        changed |= entries.pop(row, None) is not None
    for row, params, prompt, output in update.added:
        state = new_state(params, prompt, output)
        changed |= entries.pop(row, None) is not None or state is not None
        if state is not None:
            entries[row] = state
    for source, target, directionality in update.moved:
        first, second = entries.pop(source, None), entries.pop(target, None)
        changed |= first is not None or second is not None
        if first is not None:
            entries[target] = first
        if second is not None and directionality is MoveDirectionality.SWAP:
            entries[source] = second
    return changed


RequestLogitsProcessor = Callable[..., Tensor]
"""``(output_token_ids, logits)`` or ``(prompt_token_ids, output_token_ids, logits)`` → logits, all of one request."""


class AdapterLogitsProcessor(LogitsProcessor):
    """Makes a batch processor of callables that each see one request: inherit, and say which request has one."""

    def __init__(self, config: EngineConfig, device: Device, is_pin_memory: bool) -> None:
        self._requests: dict[int, Callable[[Any], Any]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The callable of a new request, of two or three parameters; None: it goes without."""

    def apply(self, logits: Tensor) -> Tensor:
        for row, process in self._requests.items():
            own = logits[row]
            new = process(own)
            if new.shape != own.shape:
                raise ValueError(f"a request's logits processor must keep the shape {tuple(own.shape)}")
            if new is not own:
                logits[row] = new
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        apply_update(self._requests, batch_update, self._new_state)

    def _new_state(self, params: SamplingParams, prompt: list[int], output: list[int]) -> Callable[[Any], Any] | None:
        process = self.new_req_logits_processor(params)
        if process is None:
            return None
        match len(inspect.signature(process).parameters):
            case 2:
                return partial(process, output)
            case 3:
                return partial(process, prompt, output)
            case count:
                raise ValueError(f"a request's logits processor must take 2 or 3 parameters, not {count}")
