"""Results of launched steps, and their copies from the device to the host."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire.protocol.wire.side_rows import LOGPROBS, Rows, SideRows
from quire.protocol.wire.worker_messages import ModelRunnerOutput
from quire.worker_proc.batch.positions import Ints
from quire.worker_proc.execute.step_extras import NO_EXTRAS, StepExtras, logprob_rows
from quire.worker_proc.sampling.accept import Accepted
from quire.worker_proc.sampling.sampler import SampledTokens


class PendingResult(Protocol):
    """Result of a step whose kernels are launched, or which has failed."""

    @property
    def ready(self) -> bool:
        """Whether ``result`` returns without waiting."""
        ...

    def wait(self) -> None:
        """Wait for the device, without the GIL."""
        ...

    def result(self) -> ModelRunnerOutput:
        """Return the result message; wait for the device if necessary."""
        ...


class DeviceTimer:
    """Measures the device time of steps: of two overlapping steps, the second starts when the first has ended."""

    def __init__(self) -> None:
        self._ended = 0.0

    def end(self, began: float) -> float:
        """Return the seconds of the step that has ended now; call it in the order in which steps were launched."""
        now = time.perf_counter()
        seconds = now - max(began, self._ended)
        self._ended = now
        return seconds


@dataclass(frozen=True, slots=True)
class NothingSampled:
    """Result of a step without sampled tokens, or of one that was not computed (``failure`` is the reason).

    ``copy``: copy of the tensors of ``extras``.
    """

    step: int
    handles: npt.NDArray[np.int32] | None = None
    extras: StepExtras = NO_EXTRAS
    copy: "HostCopy | None" = None
    failure: str = ""

    @property
    def ready(self) -> bool:
        return self.copy is None or self.copy.ready

    def wait(self) -> None:
        if self.copy is not None:
            self.copy.wait()

    def result(self) -> ModelRunnerOutput:
        arrays = [] if self.copy is None else self.copy.arrays()
        extra = self.extras.fields(arrays)
        return ModelRunnerOutput(
            self.step,
            handles=self.handles,
            bad=extra.bad,
            failure=self.failure,
            failed=extra.failed,
            side=extra.side,
        )


@dataclass(frozen=True, slots=True)
class SampledResult:
    """Result with sampled tokens, which on a GPU may still be computed or copied.

    Attributes:
        handles: as in ``ModelRunnerOutput``: None if they are the same as in the previous result.
        row_handles: handles of the sampled rows, never None.
        copy: copy of ``result_tensors(sampled, extras)``.
        end: ends the step in ``DeviceTimer`` and returns its seconds.
        accepted: accepted draft tokens; None for a step without drafts.
    """

    step: int
    sampled: SampledTokens
    handles: npt.NDArray[np.int32] | None
    row_handles: npt.NDArray[np.int32]
    copy: "HostCopy"
    end: Callable[[], float]
    accepted: Accepted | None = None
    extras: StepExtras = NO_EXTRAS

    @property
    def ready(self) -> bool:
        return self.copy.ready

    def wait(self) -> None:
        self.copy.wait()

    def result(self) -> ModelRunnerOutput:
        tokens, bad, *rest = self.copy.arrays()
        seconds = self.end()
        accepted = self.accepted
        kept = np.arange(len(self.row_handles)) if accepted is None else accepted.kept
        owners = self.row_handles if accepted is None else np.repeat(self.row_handles, accepted.counts)
        extra = self.extras.fields(rest if self.sampled.logprobs is None else rest[3:])
        failed = [(int(owners[i]), reason) for at, reason in self.sampled.failed for i in np.flatnonzero(kept == at)]
        failed += extra.failed
        return ModelRunnerOutput(
            self.step,
            tokens[kept].astype(np.int32),
            self.handles,
            counts=accepted.counts if accepted is not None and (accepted.counts != 1).any() else None,
            bad=list(dict.fromkeys(owners[bad[kept]].tolist() + extra.bad)),
            seconds=seconds,
            drafts=None if accepted is None else accepted.drafts,
            failed=list(dict(failed).items()),
            side=[*self.sent_logprobs(kept, owners, rest), *extra.side],
        )

    def sent_logprobs(self, kept: Ints, owners: npt.NDArray[np.int32], arrays: Rows) -> list[SideRows]:
        """Return the log probabilities of the tokens in ``kept``, which ascend. ``owners``: their handles."""
        sampled = self.sampled.logprobs
        if sampled is None:
            return []
        at = np.array(sampled.at, np.int64)
        picked = np.flatnonzero(np.isin(at, kept))
        handles = owners[np.searchsorted(kept, at[picked])]
        begins = np.flatnonzero(np.diff(handles, prepend=-1))
        counts = np.diff(begins, append=len(handles)).tolist()
        num_best, own = sampled.num_best[picked[begins]], [each[picked] for each in arrays[:3]]
        return [logprob_rows(LOGPROBS, handles[begins].tolist(), [0] * len(begins), counts, num_best, own)]


def result_tensors(sampled: SampledTokens | None, extras: StepExtras) -> list[torch.Tensor]:
    """Return what the host needs of a step: tokens, bad, log probabilities of tokens, then the tensors of extras."""
    tensors = [] if sampled is None else [sampled.tokens, sampled.bad]
    if sampled is not None and sampled.logprobs is not None:
        logprobs = sampled.logprobs.logprobs
        tensors += [logprobs.token_ids, logprobs.ranks, logprobs.values]
    return tensors + extras.tensors()


class HostCopy:
    """Tensors being copied to the host; on a CPU the tensors themselves."""

    def __init__(self, tensors: Sequence[torch.Tensor], copied: "torch.cuda.Event | None") -> None:
        self._tensors = tensors
        self._copied = copied

    @property
    def ready(self) -> bool:
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait for the device."""
        if self._copied is not None:
            self._copied.synchronize()

    def arrays(self) -> list[npt.NDArray[Any]]:
        """Wait for the device and return the arrays, which are valid until three more copies start."""
        self.wait()
        return [tensor.numpy() for tensor in self._tensors]


class HostCopies:
    """Copies small results to the host on a separate stream, so that the next step's kernels do not wait for them.

    Owns that stream and pinned memory. Kernels launched after ``start`` may overwrite the tensors if ``before_next``
    was called before, which makes the device wait for the copy.
    """

    _NUM_BUFFERS = 4

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._pinned: deque[torch.Tensor] = deque(maxlen=self._NUM_BUFFERS)
        self._last: torch.cuda.Event | None = None

    def start(self, tensors: Sequence[torch.Tensor], memory: torch.Tensor | None = None) -> HostCopy:
        """Start one copy that runs after the kernels that compute ``tensors``, and keeps their memory until it ends.

        Args:
            memory: uint8 memory that all tensors are views of, which is copied whole; None: they are gathered first.
        """
        if self._stream is None:
            return HostCopy(tensors, None)
        if memory is None:
            # Larger elements first, so that all are aligned.
            order = sorted(tensors, key=lambda tensor: -tensor.element_size())
            memory = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in order])
            ends = np.cumsum([tensor.nbytes for tensor in order]).tolist()
            at = {id(tensor): end - tensor.nbytes for tensor, end in zip(order, ends, strict=True)}
        else:
            start = memory.data_ptr()
            at = {id(tensor): tensor.data_ptr() - start for tensor in tensors}
        pinned = self._take(len(memory))
        # On a stream of its own, because a copy on the step's stream would start only after the kernels of the next
        # step, which is launched already.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            pinned.copy_(memory, non_blocking=True)
            # The allocator would otherwise give this memory to the next step, as soon as Python drops it, while the
            # copy still reads it.
            memory.record_stream(self._stream)
            # A blocking event sleeps. A spinning one would take a core from the scheduler and the front ends.
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        self._last = copied
        parts = [pinned[at[id(tensor)] :][: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for tensor in tensors]
        return HostCopy(parts, copied)

    def before_next(self) -> None:
        """Make kernels launched after this call wait for the copies started so far."""
        if self._last is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last)

    def _take(self, size: int) -> torch.Tensor:
        """Return pinned memory of ``size`` bytes; the oldest of four buffers is reused, at most three are in use."""
        oldest = self._pinned.popleft() if len(self._pinned) == self._NUM_BUFFERS else None
        if oldest is None or len(oldest) < size:
            oldest = torch.empty(max(size, 1), dtype=torch.uint8, pin_memory=True)
        self._pinned.append(oldest)
        return oldest[:size]
