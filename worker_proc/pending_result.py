"""A step's result on its way from the device to the scheduler."""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire.protocol.messages import Logprobs, ModelRunnerOutput
from quire.worker_proc.sampling.sampler import Sampled


class PendingResult(Protocol):
    """A step whose kernels are launched, or that has failed."""

    @property
    def ready(self) -> bool:
        """Whether ``result`` would not wait."""
        ...

    def result(self) -> ModelRunnerOutput:
        """The message; waits for the device if it must."""
        ...


@dataclass(frozen=True, slots=True)
class NothingSampled:
    """A step of which no row reached its last known position, or that was not computed (``failure`` says why)."""

    step: int
    handles: npt.NDArray[np.int32] | None = None
    failure: str = ""

    @property
    def ready(self) -> bool:
        return True

    def result(self) -> ModelRunnerOutput:
        return ModelRunnerOutput(self.step, handles=self.handles, failure=self.failure)


@dataclass(frozen=True, slots=True)
class SampledResult:
    """Tokens, which on a GPU are still being computed or copied.

    Attributes:
        handles: as in ``ModelRunnerOutput``: None where they are the same as in the result before.
        row_handles: of the sampled rows, always.
        copy: of ``sampled.tokens`` and ``sampled.bad``, in this order.
    """

    step: int
    sampled: Sampled
    handles: npt.NDArray[np.int32] | None
    row_handles: npt.NDArray[np.int32]
    copy: "HostCopy"

    @property
    def ready(self) -> bool:
        return self.copy.ready

    def result(self) -> ModelRunnerOutput:
        tokens, bad = self.copy.arrays()
        output = ModelRunnerOutput(
            self.step,
            tokens[: len(self.row_handles)].astype(np.int32),
            self.handles,
            bad=self.row_handles[bad[: len(self.row_handles)]].tolist(),
        )
        logprobs = self.sampled.logprobs
        if logprobs is None:
            return output
        return ModelRunnerOutput(
            output.step,
            output.tokens,
            output.handles,
            bad=output.bad,
            logprobs=Logprobs(logprobs.rows, logprobs.token_ids.shape[1]),
            logprob_token_ids=logprobs.token_ids.cpu().numpy().astype(np.int32).ravel(),
            logprob_values=logprobs.values.cpu().numpy().ravel(),
            logprob_ranks=logprobs.ranks.cpu().numpy().astype(np.int32),
        )


class HostCopy:
    """Tensors being copied to the host; on a CPU they are there."""

    def __init__(self, there: list[torch.Tensor], copied: "torch.cuda.Event | None") -> None:
        self._there = there
        self._copied = copied

    @property
    def ready(self) -> bool:
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def arrays(self) -> list[npt.NDArray[np.generic]]:
        """Waits for the device. Valid until three more copies have begun."""
        if self._copied is not None:
            self._copied.synchronize()
        return [tensor.numpy() for tensor in self._there]


class HostCopies:
    """Copies small results to the host on a stream of their own, so that the next step's kernels need not wait.

    Owns that stream and pinned memory. A tensor may be overwritten by what is launched after ``start``: the device
    itself waits for the copy before (``before_next``).
    """

    _IN_TURN = 4

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._pinned: deque[list[torch.Tensor]] = deque(maxlen=self._IN_TURN)
        self._last: torch.cuda.Event | None = None

    def start(self, *tensors: torch.Tensor) -> HostCopy:
        """Begin once what computes ``tensors`` is done; they stay referenced until it has ended."""
        if self._stream is None:
            return HostCopy(list(tensors), None)
        there = self._take(tensors)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, tensor in zip(there, tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        self._last = copied
        return HostCopy(there, copied)

    def before_next(self) -> None:
        """Make what is launched next on the device wait for the copies begun so far."""
        if self._last is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last)

    def _take(self, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """Pinned memory of these shapes, in turn: at most three results are in use while a fourth is filled."""
        if len(self._pinned) == self._IN_TURN:
            oldest = self._pinned.popleft()
            fits = len(oldest) == len(tensors) and all(
                p.dtype == t.dtype and p.numel() >= t.numel() for p, t in zip(oldest, tensors, strict=True)
            )
            if fits:
                self._pinned.append(oldest)
                return [p[: t.numel()].view(t.shape) for p, t in zip(oldest, tensors, strict=True)]
        fresh = [torch.empty(max(t.numel(), 1), dtype=t.dtype, pin_memory=True) for t in tensors]
        self._pinned.append(fresh)
        return [p[: t.numel()].view(t.shape) for p, t in zip(fresh, tensors, strict=True)]
