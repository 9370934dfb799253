"""Long prompts over latents on a CPU: latents are expanded to a key and a value of each head, before attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import DTYPE_BYTES
from quire.protocol.model.latent_config import LatentConfig
from quire.worker_proc.attention.backend import AttentionSpec, Rotary, StepBatch
from quire.worker_proc.attention.cpu_native import NativePlan
from quire.worker_proc.attention.cpu_torch import write_latents
from quire.worker_proc.attention.rope import rotate

FEWEST_TOKENS = 128
"""New tokens of an expanded row: with fewer, the calls by head take longer than what they save."""

PAIR_COST, EXPANSION_COST = 1.25, 0.75
"""Time of a multiplication of expanded attention, and of an expansion, by that of one of absorbed attention; measured
(docs/log.md, 29 November 2026). Each head's keys are read alone, and products run faster than attention."""

SCRATCH_BYTES = 16 << 20
"""Expanded keys and values at a time: of as many heads as fit, or of one. Heads do not depend on each other, so no
results over some of the keys have to be joined."""

TOKENS_AT_ONCE = 2048
"""Latents that are gathered and expanded at a time."""


@dataclass(frozen=True, slots=True)
class LatentPart:
    """Consecutive rows of a step.

    Attributes:
        tokens: their tokens among those of the step.
        plan: for the absorbed form, their plan. For the expanded form, that of one row whose keys are one block.
        blocks: int64, the blocks of a row in the expanded form; None: the rows are absorbed.
    """

    tokens: slice
    plan: NativePlan
    blocks: torch.Tensor | None


def latent_parts(plan: object, latent: LatentConfig) -> Sequence[LatentPart]:
    """Divide a step into rows that are expanded, each alone, and the others; empty if all are absorbed.

    Args:
        plan: of any backend; only those with an ``expander`` expand rows. Its layers have equal shapes.
    """
    if not isinstance(plan, NativePlan) or plan.expander is None:
        return ()
    if plan.parts is None:
        batch, plan.parts = plan.batch, []
        pays = expanding_pays(batch.query_lens_cpu, batch.seq_lens_cpu, latent)
        firsts = np.flatnonzero(pays | np.append(True, pays[:-1])).tolist()
        for first, last in pairwise([*firsts, batch.num_rows] if pays.any() else ()):
            tokens, own = _rows(batch, first, last)
            blocks, total = None, int(batch.seq_lens_cpu[first])
            if pays[first]:
                blocks = own.block_table[0, : -(-total // batch.block_size)].long()
                own = replace(own, block_table=torch.zeros(1, 1, dtype=torch.int32), block_size=total)
            plan.parts.append(LatentPart(tokens, plan.expander.plan(own), blocks))
    return plan.parts


def expanding_pays(
    query_lens: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32], latent: LatentConfig
) -> npt.NDArray[np.bool_]:
    """Return of each row whether it takes less time in the expanded form.

    A pair of tokens needs fewer multiplications, but each token of the context is expanded. To expand a new token takes
    as long as the products of its query and result, which the absorbed form needs instead.
    """
    new, context = query_lens.astype(np.float64), (seq_lens - query_lens).astype(np.float64)
    saved = latent.width + latent.rank - PAIR_COST * (latent.key_dim + latent.value_dim)
    added = EXPANSION_COST * latent.rank * (latent.nope_dim + latent.value_dim)
    return (query_lens >= FEWEST_TOKENS) & (new * (context + new / 2) * saved > context * added)


def expansion_bytes(config: EngineConfig) -> int:
    """Return a rank's memory for the expanded form: a second copy of ``kv_b_proj``, the scratch and its products."""
    model, latent = config.model, config.model.latent
    if latent is None or config.deterministic:
        return 0
    row, itemsize = latent.key_dim + latent.value_dim, DTYPE_BYTES[config.dtype]
    copied = model.num_layers * model.num_heads // config.tensor_parallel_size * latent.rank
    numbers = copied * (latent.nope_dim + latent.value_dim) + 2 * TOKENS_AT_ONCE * row
    return numbers * itemsize + max(SCRATCH_BYTES, config.max_model_len * row * itemsize)


def attend_expanded(
    part: LatentPart,
    query: torch.Tensor,
    latents: torch.Tensor,
    kv_cache: torch.Tensor,
    spec: AttentionSpec,
    rotary: Rotary,
    expand: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    value_dim: int,
) -> torch.Tensor:
    """Write a row's latents to the cache, and compute its attention in the expanded form.

    Args:
        part: has ``blocks``.
        query: ``[num_tokens, num_heads, rope_dim + nope_dim]``, changed in place.
        latents: ``[num_tokens, 1, rope_dim + rank]``, changed in place.
        spec: of the layer's attention over latents.
        rotary: of the row's tokens.
        expand: of each head: latents, ``[tokens, 1, rank]`` → its keys but for the rotated numbers, then its values,
            ``[tokens, 1, nope_dim + value_dim]``.

    Returns:
        ``[num_tokens, num_heads, value_dim]``.
    """
    plan = part.plan
    assert part.blocks is not None and plan.expander is not None
    # In float32, as the library does: a token of the cache must have the same numbers in both forms.
    cos, sin = rotary.cos_sin().float()
    rotated = cos.shape[-1]
    for x in (query, latents):
        x[..., :rotated] = rotate(x[..., :rotated].float(), cos, sin)
    write_latents(kv_cache, latents, plan.batch)
    total, key_dim = plan.batch.block_size, query.shape[2]
    width = key_dim + value_dim
    count = max(1, SCRATCH_BYTES // (total * width * query.element_size()))
    outs = []
    for first in range(0, spec.num_heads, count):
        products = expand[first : first + count]
        num = len(products)
        keys = query.new_empty(1, 1, num, total, width)
        for head, product in zip(keys[0, 0], products, strict=True):
            _fill(head, kv_cache[0, :, 0], part.blocks, rotated, product)
        own = replace(spec, num_heads=num, num_kv_heads=num, head_dim=width, value_dim=value_dim, key_dim=key_dim)
        outs.append(plan.expander.attend(query[:, first : first + num], keys, plan, own, None))
    return torch.cat(outs, 1)


def _fill(
    keys: torch.Tensor,
    cache: torch.Tensor,
    blocks: torch.Tensor,
    rotated: int,
    expand: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Write a head's ``keys``, ``[total, width]``, from the cache, ``[num_blocks, block_size, rope_dim + rank]``."""
    at_once = max(1, TOKENS_AT_ONCE // cache.shape[1])
    for first in range(0, len(blocks), at_once):
        latents = cache.index_select(0, blocks[first : first + at_once]).flatten(0, 1).to(keys.dtype)
        own = keys[first * cache.shape[1] :][: len(latents)]
        latents = latents[: len(own)]  # slots after the row's last token may hold NaN
        own[:, :rotated] = latents[:, :rotated]
        own[:, rotated:] = expand(latents[:, None, rotated:])[:, 0]


def _rows(batch: StepBatch, first: int, last: int) -> tuple[slice, StepBatch]:
    """Return the tokens of the rows ``[first, last)``, and a batch of these rows alone.

    Without shared prefixes, which change no result: beside an expanded row, their reads are little.
    """
    starts, own = batch.query_start_loc[first : last + 1], slice(first, last)
    tokens = slice(int(starts[0]), int(starts[-1]))
    return tokens, replace(
        batch,
        query_start_loc=starts - starts[0],
        seq_lens=batch.seq_lens[own],
        block_table=batch.block_table[own],
        slot_mapping=batch.slot_mapping[tokens],
        query_lens_cpu=batch.query_lens_cpu[own],
        seq_lens_cpu=batch.seq_lens_cpu[own],
        prefixes=(),
    )
