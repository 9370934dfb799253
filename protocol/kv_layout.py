"""How KV cache memory is cut into blocks: the one description that scheduler and worker share."""

import msgspec

from quire.protocol.model_config import ModelConfig

NULL_BLOCK_ID = 0
"""Block 0 is never given to a request: it stands where a block would, and padding may point at it."""

PAD_SLOT_ID = -1
"""A slot that is not written: padding, or a token that another rank keeps."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class KVGroup(msgspec.Struct, frozen=True):
    """Layers that share one block table: the same kind of attention over the same positions.

    Attributes:
        kind: full_attention, sliding_window, chunked_local_attention, mamba or cross_attention.
        block_size: tokens in a block; of state groups (mamba), tokens between two states that are kept.
        layers: indices of the model's layers in this group.
        window: tokens that a token sees, itself included (sliding_window), or tokens of a chunk (chunked_local).
    """

    kind: str
    block_size: int
    layers: list[int]
    window: int = 0


class KVLayout(msgspec.Struct, frozen=True):
    """All groups and the geometry of one token's entry in one layer."""

    groups: list[KVGroup]
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in one layer: keys and values."""
        return 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over the layers of the largest group (groups share the pool's blocks)."""
        return max(g.block_size * len(g.layers) for g in self.groups) * self.token_bytes


def kv_layout(model: ModelConfig, block_size: int, dtype: str) -> KVLayout:
    """The layout for a model of which every layer attends to everything: one group."""
    group = KVGroup(kind="full_attention", block_size=block_size, layers=list(range(model.num_layers)))
    return KVLayout(groups=[group], num_kv_heads=model.num_kv_heads, head_dim=model.head_dim, dtype=dtype)
