"""Drawing of tokens on each device: the native library on a CPU, torch without it, Triton on a GPU.

All three follow ``quire.kernels.sampling.sampling``, so that a seed gives the same token on each.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from quire.kernels.cpu.native.library import Native, load_native
from quire.kernels.cpu.sampling.logits import CpuLogits
from quire.kernels.cpu.sampling.sampling import CpuSampling, SamplingColumns
from quire.kernels.sampling.sampling import sample, sample_reference
from quire.kernels.sampling.sampling_noise import uniform as uniform_on_device
from quire.kernels.sampling.sampling_stats import row_statistics
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.batch.positions import Ints, SampledPositions
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.sampling.noise import uniform


class Draw(Protocol):
    """Draws tokens with the batch's sampling columns. The noise is a function of each row's seed and position."""

    def prepare(self, positions: SampledPositions) -> None:
        """Send to the device what ``draw`` needs for these positions. Call it before each ``draw``."""
        ...

    def draw(
        self, logits: torch.Tensor, positions: SampledPositions, *, is_scaled: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens, int64 ``[len(positions)]``, and whether each row's best logit is not finite, bool.

        Args:
            logits: float32 ``[len(positions), vocab]``, not changed.
            is_scaled: rows with a temperature are already divided by it.
        """
        ...

    def bad(self, logits: torch.Tensor) -> torch.Tensor:
        """Return whether each row's best logit is not finite: bool ``[num_rows]``."""
        ...

    def rows_changed(self) -> None:
        """Drop what is cached of the batch's rows."""
        ...


def make_draw(batch: InputBatch, device: torch.device, transfer: Transfer | None = None) -> Draw:
    """
    Args:
        transfer: sends arrays to the device; None: one of its own.
    """
    if device.type != "cpu":
        return TritonDraw(batch, transfer or Transfer(device))
    native = load_native()
    return TorchDraw(batch) if native is None else NativeDraw(batch, native)


class NativeDraw:
    """``Draw`` by the native library, which reads the batch's columns in place."""

    def __init__(self, batch: InputBatch, native: Native) -> None:
        self._batch = batch
        self._unit_temperature = np.zeros_like(batch.temperature)
        self._sampler = CpuSampling(native, self._columns(batch.temperature))
        self._scaled_sampler = CpuSampling(native, self._columns(self._unit_temperature))
        self._logits = CpuLogits(native)

    def _columns(self, temperature: np.ndarray[tuple[int], np.dtype[np.float32]]) -> SamplingColumns:
        batch = self._batch
        columns = (batch.seed, batch.num_known, temperature, batch.top_k, batch.top_p, batch.min_p)
        return SamplingColumns(*(torch.from_numpy(column) for column in columns))

    def prepare(self, positions: SampledPositions) -> None:
        pass

    def draw(
        self, logits: torch.Tensor, positions: SampledPositions, *, is_scaled: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sampler = self._sampler
        if is_scaled:
            self._unit_temperature[:] = self._batch.temperature > 0
            sampler = self._scaled_sampler
        return sampler.sample(logits, torch.from_numpy(positions.rows), torch.from_numpy(positions.offsets))

    def bad(self, logits: torch.Tensor) -> torch.Tensor:
        return self._logits.bad(logits)

    def rows_changed(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class RowParameters:
    """Sampling columns on the device, one element per position: the arguments of ``kernels.sampling.sampling.sample``.

    Attributes:
        rows: int64 ``[num_positions]`` on the host: the row of each position.
        ones: 0 for greedy rows, 1 for all others.
    """

    rows: Ints
    seeds: torch.Tensor
    temperature: torch.Tensor
    ones: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    any_top_k: bool
    any_top_p: bool

    @classmethod
    def of(cls, batch: InputBatch, rows: Ints, transfer: Transfer) -> "RowParameters":
        temperature, top_k, top_p = batch.temperature[rows], batch.top_k[rows], batch.top_p[rows]
        random = temperature > 0
        host = (
            batch.seed[rows].view(np.int64),
            temperature,
            random.astype(np.float32),
            top_k,
            top_p,
            batch.min_p[rows],
        )
        seeds, temperatures, ones, top_ks, top_ps, min_ps = transfer(*host)
        any_top_k, any_top_p = bool((top_k[random] > 0).any()), bool((top_p[random] < 1).any())
        return cls(rows, seeds, temperatures, ones, top_ks, top_ps, min_ps, any_top_k, any_top_p)

    def cuts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.top_k, self.top_p, self.min_p


class ParameterCache:
    """Cache of the last step's ``RowParameters``: rows that are sampled again are not gathered again."""

    def __init__(self, batch: InputBatch, transfer: Transfer) -> None:
        self._batch, self._transfer = batch, transfer
        self._kept: RowParameters | None = None

    def clear(self) -> None:
        self._kept = None

    def get(self, rows: Ints) -> RowParameters:
        if self._kept is None or not np.array_equal(self._kept.rows, rows):
            self._kept = RowParameters.of(self._batch, rows, self._transfer)
        return self._kept


class TorchDraw:
    """``Draw`` by torch on a CPU. Sorts only rows with top-k or top-p."""

    def __init__(self, batch: InputBatch) -> None:
        self._batch = batch
        self._parameters = ParameterCache(batch, Transfer(torch.device("cpu")))

    def prepare(self, positions: SampledPositions) -> None:
        pass

    def draw(
        self, logits: torch.Tensor, positions: SampledPositions, *, is_scaled: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parameters = self._parameters.get(positions.rows)
        temperature = parameters.ones if is_scaled else parameters.temperature
        best_values, tokens = logits.max(dim=-1)
        bad = ~best_values.isfinite()
        random = (temperature > 0) & ~bad
        if bool(random.any()):
            batch, rows = self._batch, positions.rows
            noise = torch.from_numpy(uniform(batch.seed[rows], batch.num_known[rows] + positions.offsets))
            cut = (parameters.top_k > 0) | (parameters.top_p < 1)
            for which in (random & cut, random & ~cut):
                columns = (column[which] for column in (noise, temperature, *parameters.cuts()))
                tokens[which] = sample_reference(logits[which], *columns)
        return tokens, bad

    def bad(self, logits: torch.Tensor) -> torch.Tensor:
        return ~logits.amax(dim=-1).isfinite()

    def rows_changed(self) -> None:
        self._parameters.clear()


class TritonDraw:
    """``Draw`` by Triton, without sorting or waiting for the device.

    A step transfers its token positions, and the sampling columns only if its rows changed.
    """

    def __init__(self, batch: InputBatch, transfer: Transfer) -> None:
        self._batch, self._transfer = batch, transfer
        self._parameters = ParameterCache(batch, transfer)

    def prepare(self, positions: SampledPositions) -> None:
        self._parameters.get(positions.rows)
        (self._at,) = self._transfer(self._batch.num_known[positions.rows] + positions.offsets)

    def draw(
        self, logits: torch.Tensor, positions: SampledPositions, *, is_scaled: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parameters = self._parameters.get(positions.rows)
        statistics = row_statistics(logits)
        tokens = sample(
            logits,
            uniform_on_device(parameters.seeds, self._at),
            parameters.ones if is_scaled else parameters.temperature,
            *parameters.cuts(),
            any_top_k=parameters.any_top_k,
            any_top_p=parameters.any_top_p,
            statistics=statistics,
        )
        return tokens, statistics.bad

    def bad(self, logits: torch.Tensor) -> torch.Tensor:
        return row_statistics(logits).bad

    def rows_changed(self) -> None:
        self._parameters.clear()
