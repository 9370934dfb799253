"""Interface of logits processors: how they receive batch changes and modify logits.

This module does not import torch, so that a front end can let a plugin validate parameters without starting a device.
Names, order of operations and interface follow vLLM's (``LogitsProcessor``, ``BatchUpdate``), with two differences: the
order removed → added → moved always holds, and any sequence of updates leaves the same state as rebuilding from the
final batch.
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
"""A torch.Tensor; ``Device`` is a torch.device."""
Device: TypeAlias = Any


class MoveDirectionality(enum.Enum):
    """UNIDIRECTIONAL: the source row's request moved to the target row; the source row is empty. SWAP: both moved."""

    UNIDIRECTIONAL = enum.auto()
    SWAP = enum.auto()


class AddedRequest(NamedTuple):
    """A request that was assigned a row.

    Attributes:
        row: the assigned row, from 0.
        prompt_token_ids: the prompt; must not be modified.
        output_token_ids: the output, a live reference: it has all tokens so far whenever ``apply`` is called. Not
            updated for a request that uses no processor.
    """

    row: int
    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]


class MovedRequest(NamedTuple):
    """A request that changed rows, or two that swapped them."""

    source: int
    target: int
    directionality: MoveDirectionality


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """Changes to the rows of the batch since the last update, to be applied in this order: removed, added, moved.

    A row that is freed and refilled in one update is listed in ``added`` only.

    Attributes:
        batch_size: number of rows after the update.
        removed: freed rows in descending order, numbered as before any move.
        added: requests with new rows; one in an occupied row replaces the request there.
        moved: moves in the order in which they happened.
    """

    batch_size: int
    removed: Sequence[int]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Modifies the logits of some rows of a batch before their tokens are sampled.

    An instance keeps per-request state by row and updates it in ``update_state``. The state must be a function of the
    updates and the lists in them, because an instance may be replaced: after one has raised or returned invalid logits,
    a new one receives the whole batch as added, and each row is tried alone to find the request that fails.
    """

    @classmethod  # noqa: B027  (by default nothing is rejected)
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Validate the parameters of a request before it is accepted.

        Raises:
            ValueError: this processor cannot serve the request; the text is sent to the client.
        """

    @classmethod
    def uses(cls, sampling_params: SamplingParams) -> bool:
        """Return whether ``apply`` may change the logits of a request with these parameters; by default always true.

        A step without such a request does not call ``apply`` and costs nothing. An AdapterLogitsProcessor need not
        override this: a request uses it if ``new_req_logits_processor`` returns a callable.
        """
        return True

    @abstractmethod
    def __init__(self, config: EngineConfig, device: Device, is_pin_memory: bool) -> None:
        """``device``: device of the logits. ``is_pin_memory``: whether pinning host memory speeds up copies to it."""

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Return the modified logits, which may be the same tensor.

        Called once per sampled token, and with drafts once more for each draft; the output token lists then include the
        drafts before that position.

        Args:
            logits: float32 ``[batch_size, vocab_size]``; row ``i`` is of the request in row ``i``. Includes rows that
                do not sample in this step, for which the result is ignored.
        """

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether it never changes the most likely token of a row; it is then skipped for greedy requests."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Apply changes to the batch, of all requests; None means no change.

        Called before each ``apply``; not called in a step that samples nothing.
        """


def apply_update(
    entries: dict[int, T],
    update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int], list[int]], T | None],
) -> bool:
    """Apply a batch update to a dictionary of row → state; return whether it changed.

    Args:
        new_state: returns the state for a request's parameters, prompt and live output, or None for no state.
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
"""``(output_token_ids, logits)`` or ``(prompt_token_ids, output_token_ids, logits)`` → logits, for one request."""


class AdapterLogitsProcessor(LogitsProcessor):
    """Base for processors that work on one request at a time; a subclass selects the callable of each request."""

    def __init__(self, config: EngineConfig, device: Device, is_pin_memory: bool) -> None:
        self._requests: dict[int, Callable[[Any], Any]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the callable of a new request, with two or three parameters, or None for none."""

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
                raise ValueError(f"a request's logits processor must have 2 or 3 parameters (got {count})")
