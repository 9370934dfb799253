"""The experts to which the tokens of one answer were routed, as clients receive them."""

from typing import Any

import numpy as np
import numpy.typing as npt

from quire.protocol.model.model_config import MoeConfig


def by_layer(rows: npt.NDArray[np.uint16], moe: MoeConfig) -> npt.NDArray[Any]:
    """Return rows ``[tokens, layers * top_k]`` as ``[tokens, layers, top_k]``: uint8, or uint16 above 256 experts."""
    dtype = np.uint8 if moe.num_experts <= 256 else np.uint16
    return rows.astype(dtype).reshape(len(rows), len(moe.layers), moe.num_experts_per_token)
