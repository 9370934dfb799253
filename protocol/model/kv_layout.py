"""The division of KV cache memory into blocks, shared by scheduler and worker."""

import msgspec

from quire.protocol.model.model_config import ModelConfig

NULL_BLOCK_ID = 0
"""Block 0 is never allocated: it fills block tables where no block is needed, and padding may point to it."""

PAD_SLOT_ID = -1
"""Slot of padding, which is not written."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


class KVGroup(msgspec.Struct, frozen=True):
    """Layers that share one block table because they keep the same positions.

    Attributes:
        kind: full_attention or sliding_window.
        block_size: tokens in a block.
        layers: indices of the model's layers in this group.
        window: tokens that a token attends to, itself included (sliding_window); 0: all.
    """

    kind: str
    block_size: int
    layers: list[int]
    window: int = 0

    @property
    def sliding_window(self) -> int:
        """Tokens that a token attends to, itself included; 0: all."""
        return self.window if self.kind == "sliding_window" else 0


class KVLayout(msgspec.Struct, frozen=True):
    """All groups, and the shape of one token's entry in one layer."""

    groups: list[KVGroup]
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer: keys and values."""
        return 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over the layers of the largest group (groups share the pool's blocks)."""
        return max(g.block_size * len(g.layers) for g in self.groups) * self.token_bytes

    def with_block_size(self, block_size: int) -> "KVLayout":
        """Return the layout with blocks of ``block_size`` tokens in the groups with the smallest blocks."""
        smallest = min(group.block_size for group in self.groups)
        groups = [
            msgspec.structs.replace(group, block_size=group.block_size // smallest * block_size)
            for group in self.groups
        ]
        return msgspec.structs.replace(self, groups=groups)


GROUP_RATIO = 1.5
"""Layer types with layer counts within this factor of each other make one group each."""


def kv_layout(model: ModelConfig, block_size: int, dtype: str) -> KVLayout:
    """Group the layers by the positions that they keep.

    All blocks of the pool have the same size, that of the largest group, so a smaller group wastes the rest of each of
    its blocks. Layers of a frequent type are therefore split into groups with as many layers as the rarest type has
    (Gemma 3's 22 layers with a window and 4 without: seven groups, the last with 2 layers). If the counts are within
    GROUP_RATIO of each other, more block tables would cost more than they save. Layers that read another layer's cache
    are not in any group.
    """
    kinds: dict[int, list[int]] = {}
    for layer in range(model.num_layers):
        if model.cache_source(layer) == layer:
            kinds.setdefault(model.window(layer), []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    size = max(counts) if max(counts) <= GROUP_RATIO * min(counts) else min(counts)
    groups = []
    for window, layers in sorted(kinds.items()):
        kind = "sliding_window" if window else "full_attention"
        cuts = [layers[start : start + size] for start in range(0, len(layers), size)]
        groups += [KVGroup(kind=kind, block_size=block_size, layers=cut, window=window) for cut in cuts]
    return KVLayout(groups=groups, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim, dtype=dtype)
