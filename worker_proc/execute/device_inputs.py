"""Inputs of the model on the device, for steps on the general path."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from quire.kernels.attention.attention_tiles import AttentionShape
from quire.kernels.cache.slot_mapping import compute_slot_mappings
from quire.protocol.model.kv_layout import KVGroup
from quire.worker_proc.attention.backend import StepBatch
from quire.worker_proc.batch.group_tables import MultiGroupBlockTable
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.batch.positions import Ints
from quire.worker_proc.batch.shared_prefixes import SharedPrefixes
from quire.worker_proc.batch.step_inputs import StepInputs
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.images.rows import RowItems
from quire.worker_proc.models.model import Inputs
from quire.worker_proc.states.rows import RowStates


class DeviceInputs(msgspec.Struct, frozen=True, eq=False):
    """What the model, the choice of sampled tokens and the update of the newest tokens read on the device.

    Attributes:
        inputs: of the model.
        batches: attention's inputs, per KV group; one for all layers of a model without groups.
        sampled_tokens: int64 ``[num_positions]``: index of each sampled position among the tokens; None if all tokens
            are sampled, in order.
        sampled_rows: int64 ``[num_positions]``: the batch row of each sampled position.
    """

    inputs: Inputs
    batches: list[StepBatch]
    sampled_tokens: torch.Tensor | None
    sampled_rows: torch.Tensor


class InputSender:
    """Makes ``DeviceInputs``; all memory belongs to its arguments."""

    def __init__(
        self,
        batch: InputBatch,
        tables: MultiGroupBlockTable,
        groups: Sequence[KVGroup],
        shapes: Sequence[tuple[AttentionShape, ...]],
        last_sampled: torch.Tensor,
        transfer: Transfer,
        fields_of: Callable[[Ints], Mapping[str, Any]],
        states: RowStates,
        items: RowItems,
    ) -> None:
        """
        Args:
            shapes: the shapes of each group's layers.
            fields_of: fields of ``StepBatch`` that the requests of rows decide, for a model without groups.
        """
        self._batch, self._tables, self._groups, self._shapes = batch, tables, groups, shapes
        self._last_sampled, self._transfer, self._fields_of = last_sampled, transfer, fields_of
        self._states, self._items = states, items
        # Only full attention groups: a window or a chunk may have passed the prefix.
        self._prefixes = [
            SharedPrefixes(tables, index) if group.keeps_all else None for index, group in enumerate(groups)
        ]

    def of(self, inputs: StepInputs) -> DeviceInputs:
        """Gather the inputs for the step's one copy; the tensors have their content after ``Transfer.send``.

        Raises:
            StepRefused: a row has no block for one of its tokens.
        """
        tokens = self._batch.tokens
        on_host = inputs.positions < tokens.length[inputs.token_rows]
        if inputs.drafts is not None:
            on_host[:] = True  # draft tokens are stored after the known tokens, all of which the host has
        ids = tokens.data[inputs.token_rows, np.where(on_host, inputs.positions, 0)].astype(np.int64)
        missing, places = np.flatnonzero(~on_host), inputs.sampled_tokens
        arrays = (inputs.query_start_loc, inputs.seq_lens, inputs.rows.astype(np.int32), inputs.positions, ids)
        starts, lens, rows, positions, token_ids = self._transfer(*arrays)
        if len(missing):
            at, owners = self._transfer(missing, inputs.token_rows[missing])
            # A token that the host does not have is the row's last sampled one, which may exist only on the device.
            self._transfer.then(lambda: token_ids.index_copy_(0, at, self._last_sampled[owners]))
        slots = self._slots(inputs, starts, positions, rows)
        model_inputs, last_keys = Inputs(token_ids, positions, states=self._states.of_step(inputs)), None
        if self._items.is_enabled:
            model_inputs, last_keys = self._items.put_into(model_inputs, inputs)
        longest, contexts = int(inputs.seq_lens.max()), inputs.seq_lens - inputs.query_lens
        batches = [
            StepBatch(
                query_start_loc=starts,
                seq_lens=lens,
                block_table=table.rows(inputs.rows, longest, self._transfer),
                slot_mapping=own,
                query_lens_cpu=inputs.query_lens,
                seq_lens_cpu=inputs.seq_lens,
                block_size=table.block_size,
                window=group.sliding_window,
                chunk=group.chunk,
                prefixes=() if prefixes is None else prefixes.of_step(inputs.rows, contexts),
                layer_shapes=shapes,
                last_keys=last_keys,
                send=self._transfer,
            )
            for table, group, shapes, prefixes, own in zip(
                self._tables.tables, self._groups, self._shapes, self._prefixes, slots, strict=True
            )
        ]
        if not batches:
            batches = [self._without_blocks(inputs, starts, lens)]
        index, own_rows = self._transfer(places, inputs.sampled.rows)
        samples_all = len(places) == len(ids) and bool((np.diff(places) == 1).all())
        return DeviceInputs(model_inputs, batches, None if samples_all else index, own_rows)

    def _without_blocks(self, inputs: StepInputs, starts: torch.Tensor, lens: torch.Tensor) -> StepBatch:
        return StepBatch(
            query_start_loc=starts,
            seq_lens=lens,
            block_table=lens.new_empty(len(lens), 0),
            slot_mapping=lens.new_empty(0, dtype=torch.int64),
            query_lens_cpu=inputs.query_lens,
            seq_lens_cpu=inputs.seq_lens,
            block_size=1,
            send=self._transfer,
            **self._fields_of(inputs.rows),
        )

    def _slots(
        self, inputs: StepInputs, starts: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """Return each group's slots, int64 ``[num_tokens]``: computed on a GPU, or by the host for a CPU."""
        if not self._tables.tables:
            return ()
        if positions.is_cpu:
            own = (table.slots(inputs.token_rows, inputs.positions) for table in self._tables.tables)
            return self._transfer(*own)
        return self._device_slots(inputs, starts, positions, rows)

    def _device_slots(
        self, inputs: StepInputs, starts: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        tables = self._tables.tables
        for table in tables:
            table.require_slots(inputs.rows, inputs.seq_lens - inputs.query_lens, inputs.seq_lens)
        slots = torch.empty(len(tables), len(positions), dtype=torch.int64, device=positions.device)
        self._transfer.then(partial(compute_slot_mappings, starts, positions, self._tables.table_set, rows, slots))
        return slots.unbind(0)
