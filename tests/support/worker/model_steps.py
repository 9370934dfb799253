"""Feeds a decoder: the minimum of a model runner."""

from typing import Any

import numpy as np
import torch

from quire.worker_proc.attention.backend import AttentionBackend, StepBatch
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.models.model import Inputs, Outputs

BLOCK_SIZE = 4


class Rows:
    """Sequences over one paged cache. In a layer with a window, the entries left of it point at the null block, as if
    their blocks were freed."""

    def __init__(self, model: Decoder, lengths: list[int], backend: AttentionBackend, seed: int = 0) -> None:
        config = model.config
        self.model = model
        self.backend = backend
        self.done = np.zeros(len(lengths), dtype=np.int32)
        blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        ids = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(seed)).int() + 1
        self.tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        for row, own in enumerate(ids.split(blocks)):
            self.tables[row, : len(own)] = own
        dtype = model.build.activation_dtype
        self.caches: list[Any] = [
            torch.zeros(self._shape(layer, sum(blocks) + 1), dtype=dtype)
            if config.cache_source(layer) == layer
            else None
            for layer in range(config.num_layers)
        ]

    def _shape(self, layer: int, num_blocks: int) -> tuple[int, ...]:
        shape = self.model.attention_shape(layer)
        _, *rest = self.backend.kv_cache_shape(num_blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        return (1 if shape.value_dim else 2, *rest)

    def step(self, tokens: dict[int, torch.Tensor], **asked: Any) -> dict[int, torch.Tensor]:
        """Run the next tokens of some rows; return their logits by row, ``[tokens, vocab]`` each."""
        logits = self.model.logits(self.run(tokens, **asked).hidden)
        assert logits.dtype is torch.float32
        return dict(zip(tokens, logits.split([len(own) for own in tokens.values()]), strict=True))

    def run(self, tokens: dict[int, torch.Tensor], **asked: Any) -> Outputs:
        """Run the next tokens of some rows. ``asked``: further fields of ``Inputs``."""
        config = self.model.config
        rows = np.array(list(tokens), dtype=np.int64)
        query_lens = np.array([len(t) for t in tokens.values()], dtype=np.int32)
        positions = [torch.arange(self.done[row], self.done[row] + len(t)) for row, t in tokens.items()]
        self.done[rows] += query_lens
        slots = [self.tables[row][p // BLOCK_SIZE].long() * BLOCK_SIZE + p % BLOCK_SIZE
                 for row, p in zip(rows, positions, strict=True)]  # fmt: skip
        reaches = [(config.window(layer), config.chunk(layer)) for layer in range(config.num_layers)]
        by_reach = {
            reach: self.backend.plan(self._batch(rows, query_lens, torch.cat(slots), *reach)) for reach in set(reaches)
        }
        plans = [
            by_reach[reach] if config.cache_source(layer) == layer else None for layer, reach in enumerate(reaches)
        ]
        inputs = Inputs(torch.cat(list(tokens.values())), torch.cat(positions), **asked)
        return self.model(inputs, self.caches, plans, self.backend)

    def _batch(self, rows: Any, query_lens: Any, slots: torch.Tensor, window: int, chunk: int) -> StepBatch:
        seq_lens = self.done[rows]
        batch = StepBatch(
            query_start_loc=torch.from_numpy(np.concatenate([[0], query_lens.cumsum()]).astype(np.int32)),
            seq_lens=torch.from_numpy(seq_lens),
            block_table=self.tables[torch.from_numpy(rows)],
            slot_mapping=slots,
            query_lens_cpu=query_lens,
            seq_lens_cpu=seq_lens,
            block_size=BLOCK_SIZE,
            window=window,
            chunk=chunk,
        )
        for row, first in enumerate(batch.first_visible // BLOCK_SIZE):
            batch.block_table[row, :first] = 0
        return batch

    def run_in_pieces(self, prompts: list[torch.Tensor], chunk: int = 7, single: int = 10) -> list[torch.Tensor]:
        """Return the logits of prompts that are computed in chunks, except the last ``single`` tokens, which are
        computed one by one. Rows start late and end early, so that most steps mix chunks with single tokens."""
        pieces: dict[int, list[torch.Tensor]] = {row: [] for row in range(len(prompts))}
        for step in range(1000):
            now = {}
            for row in reversed(range(len(prompts))):
                left = len(prompts[row]) - int(self.done[row])
                if left and step >= 2 * row:
                    now[row] = prompts[row][self.done[row] :][: chunk if left > single else 1]
            if not now and step > 2 * len(prompts):
                break
            if now:
                for row, logits in self.step(now).items():
                    pieces[row].append(logits)
        return [torch.cat(parts) for parts in pieces.values()]

    def greedy(self, prompts: list[torch.Tensor], num_tokens: int, chunk: int = 7) -> list[list[int]]:
        """Return the logits of prompts and their continuations; each row decodes a token per step once its prompt is
        computed."""
        known = [prompt.tolist() for prompt in prompts]
        wanted = [len(prompt) + num_tokens for prompt in prompts]
        while any(len(tokens) < length for tokens, length in zip(known, wanted, strict=True)):
            now = {}
            for row, tokens in enumerate(known):
                if len(tokens) < wanted[row]:
                    now[row] = torch.tensor(tokens[self.done[row] :][:chunk])
            for row, logits in self.step(now).items():
                if self.done[row] == len(known[row]):
                    known[row].append(int(logits[-1].argmax()))
        return known
