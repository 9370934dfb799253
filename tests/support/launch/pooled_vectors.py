"""Made-up results of requests for vectors and scores."""

from functools import cache

import numpy as np
import numpy.typing as npt

from quire.frontend.engine.update import Update
from quire.protocol.model.pooling_config import PoolingConfig
from quire.protocol.request.pooling_params import PoolingParams
from quire.protocol.wire.front_end_messages import EndReason

SIZE = 8
BOTH = PoolingConfig(tasks=["embed", "token_embed"], size=SIZE, normalize=True)
RERANKER = PoolingConfig(tasks=["classify"], pooling="cls", size=SIZE, labels=["LABEL_0"], activation="sigmoid")
CLASSIFIER = PoolingConfig(tasks=["classify"], size=SIZE, labels=["no", "maybe", "yes"], activation="softmax")


@cache
def vector_of(token: int) -> npt.NDArray[np.float32]:
    """Return the vector of a token, of length 1."""
    made = np.random.default_rng(token).normal(size=SIZE).astype(np.float32)
    return np.asarray(made / np.linalg.norm(made), np.float32)


def embedding_of(prompt: list[int], dimensions: int = 0) -> npt.NDArray[np.float32]:
    """Return the vector of a prompt: the mean of those of its tokens, of length 1."""
    mean = np.mean([vector_of(token) for token in prompt], axis=0)[: dimensions or SIZE]
    return np.asarray(mean / np.linalg.norm(mean), np.float32)


def rows_of(prompt: list[int], params: PoolingParams, num_labels: int = 1) -> npt.NDArray[np.float32]:
    match params.task:
        case "embed":
            return embedding_of(prompt, params.dimensions)[None]
        case "token_embed":
            return np.stack([vector_of(token) for token in prompt])
        case "classify":
            return np.stack([vector_of(sum(prompt))[:num_labels]])


def pooled_update(prompt: list[int], params: PoolingParams, num_labels: int = 1) -> Update:
    return Update(
        ended=EndReason.STOPPED, pooled=rows_of(prompt, params, num_labels), num_cached_tokens=len(prompt) // 2
    )
