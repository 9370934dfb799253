"""Training of the demo model for a number of tokens.

Several documents share a row of a batch. A mask separates them, and rotary positions are relative, so every document
trains as if it began at position 0, where a served prompt begins. The learning rate is a function of the tokens seen,
so a busy machine makes the same model as an idle one, only later.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from llama import Llama, rotary_tables
from muon import Muon
from tokenizer import Sample
from torch import Tensor
from torch.nn import functional

ROW_LENGTHS = (256, 640)
TOKENS_PER_BATCH = 2560
MATRIX_RATE, VECTOR_RATE = 0.01, 0.004
WARM_UP, DECAY_FROM = 0.02, 0.4
STEPS_PER_LINE = 20


@dataclass(frozen=True)
class Batch:
    """Rows of packed documents; `documents` has the document number of each token within its row."""

    tokens: Tensor
    weights: Tensor
    documents: Tensor


@dataclass(frozen=True)
class Progress:
    """Amount of training done."""

    steps: int
    tokens: int
    seconds: float


def _packed(samples: Sequence[Sample], length: int) -> list[list[Sample]]:
    """Pack documents into rows of at most `length` tokens; each goes to the fullest row with room for it."""
    space: list[list[list[Sample]]] = [[] for _ in range(length + 1)]
    rows: list[list[Sample]] = []
    for sample in samples:
        size = len(sample.tokens)
        left = next((room for room in range(size, length) if space[room]), None)
        if left is None:
            left = length
            rows.append([])
            space[left].append(rows[-1])
        row = space[left].pop()
        row.append(sample)
        space[left - size].append(row)
    return rows


def _batch(rows: Sequence[Sequence[Sample]], length: int) -> Batch:
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    weights = torch.zeros(len(rows), length)
    documents = torch.full((len(rows), length), -1, dtype=torch.long)
    for number, row in enumerate(rows):
        start = 0
        for document, sample in enumerate(row):
            end = start + len(sample.tokens)
            tokens[number, start:end] = torch.tensor(sample.tokens)
            weights[number, start + 1 : end] = torch.tensor(sample.weights[1:])
            documents[number, start:end] = document
            start = end
    return Batch(tokens, weights, documents)


def make_batches(samples: Sequence[Sample], seed: int) -> list[Batch]:
    """Return all samples in shuffled batches; long documents get batches of longer rows, the longest are dropped."""
    batches: list[Batch] = []
    shortest = 0
    for length in ROW_LENGTHS:
        rows = _packed([s for s in samples if shortest < len(s.tokens) <= length], length)
        random.Random(seed).shuffle(rows)
        size = TOKENS_PER_BATCH // length
        batches += [_batch(rows[at : at + size], length) for at in range(0, len(rows), size)]
        shortest = length
    random.Random(seed).shuffle(batches)
    return batches


def batch_loss(model: Llama, batch: Batch, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Return the weighted mean loss of a batch; logits are computed only where the loss weight is not 0."""
    length = batch.tokens.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    mask = (batch.documents[:, None, :, None] == batch.documents[:, None, None, :]) & causal
    hidden = model.model(batch.tokens, tables[0][:length], tables[1][:length], mask)
    weights = batch.weights[:, 1:]
    counts = weights > 0
    losses = functional.cross_entropy(
        model.logits(hidden[:, :-1][counts]), batch.tokens[:, 1:][counts], reduction="none"
    )
    return (losses * weights[counts]).sum() / weights.sum()


def validation_loss(model: Llama, batches: Sequence[Batch]) -> float:
    """Return the mean loss over batches that are not in the training data."""
    tables = rotary_tables(model.shape, max(ROW_LENGTHS))
    with torch.inference_mode():
        return sum(batch_loss(model, batch, tables).item() for batch in batches) / len(batches)


def _rate_factor(progress: float) -> float:
    return min(1.0, progress / WARM_UP, max(0.0, (1.0 - progress) / (1.0 - DECAY_FROM)))


def train(
    model: Llama, batches: Sequence[Batch], rate: float, log: Callable[[str], None], check: Callable[[Llama], None]
) -> Progress:
    """Train once over the batches and round the weights to bfloat16, as the checkpoint stores them.

    `rate` scales the learning rates; `check` is called with the model ten times during training.
    """
    tables = rotary_tables(model.shape, max(ROW_LENGTHS))
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(others, lr=VECTOR_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    started = time.monotonic()
    tokens = 0
    for step, batch in enumerate(batches, 1):
        factor = rate * _rate_factor(step / len(batches))
        adam.param_groups[0]["lr"] = VECTOR_RATE * factor
        loss = batch_loss(model, batch, tables)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step(MATRIX_RATE * factor)
        adam.step()
        model.zero_grad(set_to_none=True)
        tokens += batch.tokens.numel()
        if step % STEPS_PER_LINE == 0:
            elapsed = time.monotonic() - started
            log(f"{elapsed:6.0f} s  step {step:5d}  {tokens / elapsed:6.0f} tokens/s  loss {loss.item():.4f}")
        if step % max(1, len(batches) // 10) == 0:
            check(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return Progress(len(batches), tokens, time.monotonic() - started)
