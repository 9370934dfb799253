"""Makes vectors and scores from the hidden states of a step, for requests that end with their prompt."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire.protocol.model.pooling_config import PoolingConfig, PoolingTask
from quire.protocol.request.pooling_params import PoolingParams
from quire.worker_proc.batch.input_batch import InputBatch, RowColumn
from quire.worker_proc.batch.positions import Ints
from quire.worker_proc.batch.step_inputs import StepInputs
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.models.model import Model
from quire.worker_proc.pooling.pooled_values import PooledPart, PooledValues

_EPSILON = 1e-30
"""Added to a mean square before its root, so that a vector of zeros stays one."""


class Pooler:
    """Owns the part of each row's prompt that is pooled already, for models that need more than its last token.

    Attributes:
        held: float32 ``[max_rows, hidden_size]``: the sum of the hidden states so far (mean), or that of the first
            token (cls); None if the last token is pooled. It is added to token by token, in the order of the prompt,
            so that its bits depend neither on the chunks of the prompt nor on other rows.
    """

    def __init__(self, model: Model, pooling: PoolingConfig, batch: InputBatch, transfer: Transfer) -> None:
        self._model, self._config, self._batch, self._transfer = model, pooling, batch, transfer
        self._params = batch.column(np.object_, lambda new: new.pooling, None)
        self.held: torch.Tensor | None = None
        if pooling.pooling != "last":
            shape = batch.max_rows, model.config.hidden_size
            self.held = torch.zeros(shape, dtype=torch.float32, device=model.build.device)
            batch.register(RowColumn(self.held))

    def targets(self, inputs: StepInputs) -> "PoolTargets | None":
        """Find what the step computes for pooled rows; None if it has none."""
        batch = self._batch
        at = np.flatnonzero(~batch.samples[inputs.rows])
        if not len(at):
            return None
        ending = inputs.seq_lens == batch.num_known[inputs.rows]
        members: dict[_Kind, list[int]] = {}
        holding = np.zeros(len(inputs.rows), np.bool_)
        for index in at.tolist():
            params: PoolingParams = self._params[inputs.rows[index]]
            holding[index] = self.held is not None and params.task != "token_embed"
            if params.task == "token_embed" or ending[index]:
                kind = _Kind(params.task, params.dimensions, params.use_activation)
                members.setdefault(kind, []).append(index)
        taken = self._taken(inputs, holding) if holding.any() else None
        groups = [self._group(inputs, kind, np.array(own, np.int64)) for kind, own in members.items()]
        return PoolTargets(self, taken, groups)

    def batch_fields(self, rows: Ints) -> dict[str, Any]:
        """Return the fields of ``StepBatch`` that the requests of ``rows`` decide, for a model without a KV cache."""
        params: list[PoolingParams | None] = self._params[rows].tolist()
        return {
            "second_texts": np.array([0 if own is None else own.second_text for own in params], np.int32),
            "every_token": any(own is None or own.task == "token_embed" for own in params),
        }

    def _taken(self, inputs: StepInputs, holding: npt.NDArray[np.bool_]) -> "_Taken":
        """Return the tokens that ``held`` takes in this step."""
        starts, lengths = inputs.query_start_loc[:-1].astype(np.int64), inputs.query_lens.astype(np.int64)
        is_first = inputs.seq_lens == lengths
        if self._config.pooling == "cls":
            first, rows = self._transfer(starts[holding & is_first], inputs.rows[holding & is_first])
            return _Taken(rows, first)
        whole = None if holding.all() else np.flatnonzero(np.repeat(holding, lengths))
        lengths, is_first = lengths[holding], is_first[holding]
        joins = None
        if not is_first.all():
            lengths = lengths + 1  # the sum so far is the first of each row's terms
            sums = np.cumsum(lengths) - lengths
            joins = self._transfer(sums, np.delete(np.arange(lengths.sum()), sums))
        rows, terms = self._transfer(inputs.rows[holding], lengths)
        return _Taken(rows, None if whole is None else self._transfer(whole)[0], terms, joins)

    def _group(self, inputs: StepInputs, kind: "_Kind", members: Ints) -> "_Group":
        rows, counts = inputs.rows[members], inputs.query_lens[members]
        starts, handles = inputs.query_start_loc[members].astype(np.int64), self._batch.handles[rows].tolist()
        if kind.task == "token_embed":
            begins = (inputs.seq_lens[members] - counts).tolist()
            parts = [PooledPart(*part) for part in zip(handles, begins, counts.tolist(), strict=True)]
            within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
            (index,) = self._transfer(np.repeat(starts, counts) + within)
            return _Group(kind, parts, index)
        parts = [PooledPart(handle, 0, 1) for handle in handles]
        if self.held is None:
            (index,) = self._transfer(starts + counts - 1)
            return _Group(kind, parts, index)
        index, lengths = self._transfer(rows, inputs.seq_lens[members].astype(np.float32))
        return _Group(kind, parts, index, lengths)

    def hold(self, hidden: torch.Tensor, taken: "_Taken") -> None:
        """Take the tokens of a step into ``held``."""
        assert self.held is not None
        values = (hidden if taken.index is None else hidden[taken.index]).float()
        if taken.terms is not None:
            if taken.joins is not None:
                sums, tokens = taken.joins
                joined = values.new_empty(len(sums) + len(tokens), values.shape[1])
                joined.index_copy_(0, sums, self.held[taken.rows])
                values = joined.index_copy_(0, tokens, values)
            # Adds one term after another, on each device.
            values = torch.segment_reduce(values, "sum", lengths=taken.terms, axis=0, unsafe=True)
        self.held.index_copy_(0, taken.rows, values)

    def values(self, hidden: torch.Tensor, group: "_Group") -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values of a group, float32 ``[rows, width]``, and whether each row is not finite."""
        raw = self._raw(hidden, group)
        width = self._config.width(group.kind.task, group.kind.dimensions)
        return self._activated(raw, group.kind)[:, :width].contiguous(), raw.isfinite().all(1).logical_not()

    def _raw(self, hidden: torch.Tensor, group: "_Group") -> torch.Tensor:
        kind = group.kind
        if self.held is None or group.lengths is None:
            chosen = hidden[group.index]
        else:
            chosen = self.held[group.index]
            if self._config.pooling == "mean":
                chosen = chosen / group.lengths[:, None]
        if kind.task == "classify":
            return self._model.classify(chosen.to(hidden.dtype))
        return chosen[:, : kind.dimensions or None].float()

    def _activated(self, raw: torch.Tensor, kind: "_Kind") -> torch.Tensor:
        if not kind.use_activation:
            return raw
        if kind.task != "classify":
            # The device's norm, whose bits for a row do not depend on other rows.
            norm = self._model.build.ops.rms_norm
            return norm(raw.contiguous(), None, _EPSILON) * raw.shape[1] ** -0.5 if self._config.normalize else raw
        match self._config.activation:
            case "sigmoid":
                return raw.sigmoid()
            case "softmax":
                return raw.softmax(1)
        return raw


@dataclass(frozen=True, slots=True)
class _Taken:
    """What ``Pooler.held`` takes of a step; all int64.

    Attributes:
        rows: ``[n]``: the rows that change.
        index: the tokens that are taken, by row; None: all of the step.
        terms: ``[n]``: number of terms of each row's sum; None: one token replaces the row.
        joins: indices among the terms of each row's sum so far, ``[n]``, and of the tokens; None: all rows begin.
    """

    rows: torch.Tensor
    index: torch.Tensor | None
    terms: torch.Tensor | None = None
    joins: list[torch.Tensor] | None = None


class _Kind(NamedTuple):
    """The parameters that decide how values are computed, as in ``PoolingParams``."""

    task: PoolingTask
    dimensions: int
    use_activation: bool


@dataclass(frozen=True, slots=True)
class _Group:
    """Requests of one kind, of which the step makes values.

    Attributes:
        parts: one for each request, in the order of ``index``.
        index: int64: the tokens of the step whose hidden states are pooled, or with ``lengths`` rows of
            ``Pooler.held``.
        lengths: float32 ``[rows]``: number of tokens of each prompt.
    """

    kind: _Kind
    parts: list[PooledPart]
    index: torch.Tensor
    lengths: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PoolTargets:
    """The tokens and rows of a step that are pooled; their tensors have their content after ``Transfer.send``."""

    pooler: Pooler
    taken: _Taken | None
    groups: list[_Group]

    def pool(self, hidden: torch.Tensor) -> PooledValues | None:
        """Pool the hidden states of all tokens of the step, ``[num_tokens, hidden_size]``, after the final norm.

        Returns:
            The values, or None if no prompt ends in this step.
        """
        if self.taken is not None:
            self.pooler.hold(hidden, self.taken)
        if not self.groups:
            return None
        made = [self.pooler.values(hidden, group) for group in self.groups]
        return PooledValues(
            [group.parts for group in self.groups], [values for values, _ in made], [bad for _, bad in made]
        )
