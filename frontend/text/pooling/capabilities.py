"""What a model can do, and refusals of calls that need another model."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.protocol.errors import InvalidRequest
from quire.protocol.model.pooling_config import PoolingConfig, PoolingTask

HTTP_ROUTES = {
    "generate": "/v1/chat/completions or /v1/completions",
    "embed": "/v1/embeddings",
    "token_embed": "/pooling",
    "classify": "/classify",
    "score": "/score",
    "rerank": "/rerank",
}
METHODS = {
    "generate": "LLM.generate",
    "embed": "LLM.embed",
    "token_embed": "LLM.encode",
    "classify": "LLM.classify",
    "score": "LLM.score",
    "rerank": "LLM.rerank",
}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one model can do. All methods that check it raise InvalidRequest (``unsupported_value``).

    Attributes:
        generates: it has a head for tokens.
        pooling: how it makes vectors and scores; None: it does not.
        ways: for each task, the route or method for it, which errors name.
    """

    generates: bool = True
    pooling: PoolingConfig | None = None
    ways: Mapping[str, str] = field(default_factory=HTTP_ROUTES.copy)

    @property
    def tasks(self) -> list[str]:
        """Return generate, the tasks of requests for vectors, and score and rerank if pairs can be compared."""
        pooled: list[str] = [] if self.pooling is None else [*self.pooling.tasks]
        pairs = ["score", "rerank"] if self.scoring_task is not None else []
        return ["generate"] * self.generates + pooled + pairs

    @property
    def scoring_task(self) -> PoolingTask | None:
        """How pairs are compared: classify (the model reads both texts), or embed (the cosine of their vectors)."""
        if self.pooling is None:
            return None
        if "classify" in self.pooling.tasks and self.pooling.width("classify") == 1:
            return "classify"
        return "embed" if "embed" in self.pooling.tasks else None

    def require_generation(self, caller: str) -> None:
        """Check that the model generates text. ``caller``: the route or method, for the message."""
        if not self.generates:
            raise self._wrong(caller, "generates text")

    def require_task(self, caller: str, task: PoolingTask) -> PoolingConfig:
        """Return the pooling of a model that has this task."""
        if self.pooling is None or task not in self.pooling.tasks:
            raise self._wrong(caller, "has a classification head" if task == "classify" else "makes vectors")
        return self.pooling

    def require_pooling(self, caller: str) -> PoolingConfig:
        """Return the pooling of a model that has one."""
        if self.pooling is None:
            raise self._wrong(caller, "makes vectors or scores")
        return self.pooling

    def require_scoring(self, caller: str) -> PoolingTask:
        """Return the ``scoring_task`` of a model that has one."""
        if self.scoring_task is None:
            raise self._wrong(caller, "makes vectors or has one label")
        return self.scoring_task

    def _wrong(self, caller: str, needed: str) -> InvalidRequest:
        names = {"generate": "generate text"}
        parts = [f"{names.get(task, task)} ({self.ways[task]})" for task in self.tasks]
        hint = "; --pooling last lets it make vectors" if self.pooling is None else ""
        text = f"{caller} needs a model that {needed}: this model can {', '.join(parts)}{hint}"
        return InvalidRequest(text, "model", "unsupported_value")
