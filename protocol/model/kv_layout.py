"""The division of KV cache memory into blocks, shared by scheduler and worker."""

from collections.abc import Sequence
from math import lcm, prod

import msgspec

from quire.protocol.model.model_config import ModelConfig

NULL_BLOCK_ID = 0
"""Block 0 is never allocated: it fills block tables where no block is needed, and padding may point to it."""

PAD_SLOT_ID = -1
"""Slot of padding, which is not written."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


STATE_GRID = 64
"""Tokens between the positions at which states may be kept: the chunk in which gated delta rules and state space models
are computed. A chunk that begins elsewhere rounds 10 to 25 times worse."""

STATE_SHARE = 0.2
"""Part of the pool's memory for slots of states, which has the most hits of the prefix cache on recorded traces: a few
per cent more or less cost some, and half costs a third."""

STATE_ALIGNMENT = 64
"""Each tensor of a slot begins at a multiple of this many bytes."""


class KVGroup(msgspec.Struct, frozen=True):
    """Layers that share one block table because they keep the same positions.

    Attributes:
        kind: full_attention, sliding_window, chunked_local or latent_attention: full attention over one vector per
            token, which is the key of all heads, and whose last dimensions are their value.
        block_size: tokens in a block; the same in all groups of a layout.
        layers: indices of the model's layers in this group.
        window: tokens that a token attends to, itself included (sliding_window), or tokens of a chunk, from whose
            beginning on they attend to each other (chunked_local); 0: all.
        num_kv_heads, head_dim: shape of a token's entry in one layer; 0: that of the ``KVLayout``.
    """

    kind: str
    block_size: int
    layers: list[int]
    window: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0

    @property
    def sliding_window(self) -> int:
        """Tokens that a token attends to, itself included; 0: all."""
        return self.window if self.kind == "sliding_window" else 0

    @property
    def chunk(self) -> int:
        """Tokens of a chunk, before whose beginning none of its tokens attends; 0: no chunks."""
        return self.window if self.kind == "chunked_local" else 0

    @property
    def keeps_all(self) -> bool:
        """Whether a token attends to all tokens before it, so that a request keeps all its blocks."""
        return self.kind in ("full_attention", "latent_attention")

    @property
    def parts(self) -> int:
        """Vectors of a token's entry per head: a key and a value, or a latent."""
        return 1 if self.kind == "latent_attention" else 2


class StateTensor(msgspec.Struct, frozen=True):
    """One tensor of a request's recurrent state: a summary of all its tokens, or a convolution's last inputs.

    Attributes:
        layer: path of the module that keeps it, below the model.
        name: what the module's code calls it.
        shape: of one request's state on one rank.
        dtype: as in ``DTYPE_BYTES``; states need not have the dtype of the activations.
    """

    layer: str
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def slot_bytes(states: Sequence[StateTensor]) -> int:
    """Return the bytes that these tensors of a slot take, one after the other."""
    return sum(_aligned(tensor.num_bytes) for tensor in states)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // STATE_ALIGNMENT) * STATE_ALIGNMENT


class KVLayout(msgspec.Struct, frozen=True):
    """All groups, and the shape of one token's entry in one layer of a group without its own.

    A model that keeps no KV (an encoder) has no groups. Its requests then need no blocks, and each is computed in one
    step.

    Attributes:
        states: the tensors of one *slot*, which holds the recurrent state of one request at one position; empty for
            models without such layers. Slots are in a pool of their own: a state weighs as much as thousands of tokens,
            so that blocks of equal bytes would hold thousands of tokens too.
        state_chunk: tokens of which ``state_grid`` is a multiple.
    """

    groups: list[KVGroup]
    num_kv_heads: int
    head_dim: int
    dtype: str
    states: list[StateTensor] = []
    state_chunk: int = 1

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot of states on one rank; 0 without states."""
        return self.num_state_parts * self.state_part_bytes

    @property
    def num_state_parts(self) -> int:
        """Equal parts of a slot, each of which fits the page of a block in a tier; 0 without states.

        In messages about pages, part ``i`` is in KV group ``len(groups) + i``, where ids of blocks are slots.
        """
        return -(-slot_bytes(self.states) // (self.block_bytes or slot_bytes(self.states))) if self.states else 0

    @property
    def state_part_bytes(self) -> int:
        """Bytes of one part of a slot, the last of which may end with unused bytes."""
        return _aligned(-(-slot_bytes(self.states) // max(self.num_state_parts, 1)))

    @property
    def state_grid(self) -> int:
        """Tokens: states are kept for later requests at multiples of it, which are ends of blocks. 0 without states."""
        return lcm(self.state_chunk, self.block_size) if self.states else 0

    def num_slots(self, num_bytes: float, max_num_seqs: int) -> int:
        """Return the number of slots for which a pool of this size is best divided, without slot 0.

        At least two for each request of a step: one that it computes in, and one for the prefix cache. More than one
        for each part of the blocks that may have a checkpoint are never used.
        """
        kept = int(num_bytes // self.block_bytes) * self.block_size // self.state_grid
        share = int(num_bytes * STATE_SHARE // self.slot_bytes)
        return max(2 * max_num_seqs, min(share, max_num_seqs + kept))

    @property
    def block_size(self) -> int:
        """Tokens in a block of any group; 1 without groups."""
        return self.groups[0].block_size if self.groups else 1

    def kv_shape(self, group: KVGroup) -> tuple[int, int]:
        """Return the number of KV heads and their dimension in the layers of a group."""
        return group.num_kv_heads or self.num_kv_heads, group.head_dim or self.head_dim

    def token_bytes(self, group: KVGroup) -> int:
        """Return the bytes of one token in one layer."""
        num_kv_heads, head_dim = self.kv_shape(group)
        return group.parts * num_kv_heads * head_dim * DTYPE_BYTES[self.dtype]

    @property
    def is_packed(self) -> bool:
        """Whether a block of each group has its layers side by side in one tensor: their entries differ in size.

        Otherwise the first layers of all groups share one tensor, the second ones another, and so on.
        """
        return len({(group.parts, self.kv_shape(group)) for group in self.groups}) > 1

    @property
    def parts(self) -> int:
        """Vectors per head of an entry in a packed block."""
        return max(group.parts for group in self.groups)

    @property
    def packed_width(self) -> int:
        """Numbers per token in one part of a packed block: what the group with the most has, rounded up.

        A multiple of each head's width, so that torch operators can gather heads from any block.
        """
        widths = [len(group.layers) * prod(self.kv_shape(group)) for group in self.groups]
        unit = lcm(*(self.kv_shape(group)[1] for group in self.groups))
        return -(-max(widths) // unit) * unit

    def group_bytes(self, group: KVGroup) -> int:
        """Return the bytes of one block of a group."""
        if self.is_packed:
            return self.parts * self.block_size * self.packed_width * DTYPE_BYTES[self.dtype]
        return len(group.layers) * self.block_size * self.token_bytes(group)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the pool, which any group may have."""
        return max(map(self.group_bytes, self.groups), default=0)

    def rank_block_bytes(self, num_ranks: int) -> int:
        """Return the bytes of one block on the rank with the most KV heads; ranks may share a head."""
        return self.of_rank(num_ranks).block_bytes

    def of_rank(self, num_ranks: int) -> "KVLayout":
        """Return the layout of the rank with the most KV heads."""
        shapes = [(group, *self.kv_shape(group)) for group in self.groups]
        groups = [
            msgspec.structs.replace(g, num_kv_heads=-(-heads // num_ranks), head_dim=dim) for g, heads, dim in shapes
        ]
        return msgspec.structs.replace(self, groups=groups)

    def with_block_size(self, block_size: int) -> "KVLayout":
        """Return the layout with blocks of ``block_size`` tokens."""
        groups = [msgspec.structs.replace(group, block_size=block_size) for group in self.groups]
        return msgspec.structs.replace(self, groups=groups)


GROUP_RATIO = 1.5
"""Layer types with bytes per token within this factor of each other make one group each."""


def kv_layout(model: ModelConfig, block_size: int, dtype: str) -> KVLayout:
    """Group the layers by the positions that they keep, in groups of about equal bytes per token.

    A block of the pool has the same bytes in every group, so a group with fewer than the largest wastes the rest of
    each of its blocks. Layers of a type with many bytes are therefore split into groups with at most as many as the
    type with the fewest has (Gemma 3's 22 layers with a window and 4 without: seven groups, the last with 2 layers). If
    types are within GROUP_RATIO of each other, more block tables would cost more than they save. Layers that read
    another layer's cache are not in any group.
    """
    if model.encoder is not None:
        return KVLayout(groups=[], num_kv_heads=model.num_kv_heads, head_dim=model.head_dim, dtype=dtype)
    kinds: dict[tuple[int, int, tuple[int, int]], list[int]] = {}
    for layer in range(model.num_layers):
        if model.cache_source(layer) == layer:
            kinds.setdefault((model.window(layer), model.chunk(layer), model.kv_shape(layer)), []).append(layer)
    widths = [len(layers) * prod(shape) for (*_, shape), layers in kinds.items()]
    width = max(widths) if max(widths) <= GROUP_RATIO * min(widths) else min(widths)
    width = max(width, *(prod(shape) for *_, shape in kinds))
    groups = []
    whole = "full_attention" if model.latent is None else "latent_attention"
    # Sorted, so that scheduler and workers number the groups alike; full attention, which has neither, comes first.
    for (window, chunk, shape), layers in sorted(kinds.items()):
        kind = "sliding_window" if window else "chunked_local" if chunk else whole
        own_shape = shape if model.kv_shapes else (0, 0)
        # Layers with smaller entries are more to a block, rather than tokens: blocks of more tokens would cut all hits
        # to their multiples. Pools per group would need a size each, which depends on prompts that are not known.
        size = width // prod(shape)
        cuts = [layers[start : start + size] for start in range(0, len(layers), size)]
        groups += [KVGroup(kind, block_size, cut, window or chunk, *own_shape) for cut in cuts]
    states = state_tensors(model, model.dtype)
    return KVLayout(groups, model.num_kv_heads, model.head_dim, dtype, states, STATE_GRID)


def state_tensors(model: ModelConfig, dtype: str) -> list[StateTensor]:
    """Return the tensors of a slot; ``dtype``: of the activations, which states have that are not always wider."""
    measured = [] if model.transformers is None else model.transformers.states
    return [
        StateTensor(state.module, f"{state.kind} {state.index}", state.shape, state.dtype or dtype)
        for state in measured
    ]
