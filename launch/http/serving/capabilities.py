"""What the model can do, and refusals of requests on routes for other models."""

from dataclasses import dataclass

from quire.launch.http.schema.errors import ApiError
from quire.protocol.model.pooling_config import PoolingConfig
from quire.protocol.request.pooling_params import PoolingTask

GENERATION_ROUTES = "/v1/chat/completions or /v1/completions"
ROUTES_OF_TASKS = {
    "embed": "/v1/embeddings",
    "token_embed": "/pooling",
    "classify": "/classify",
    "score": "/score",
    "rerank": "/rerank",
}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """``generates``: it has a head for tokens. ``pooling``: how it makes vectors and scores, or None."""

    generates: bool = True
    pooling: PoolingConfig | None = None

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

    def require_generation(self, path: str) -> None:
        """Raise ApiError 400 unless the model generates text. ``path``: the route, for the message."""
        if not self.generates:
            raise _wrong_route(path, "generates text", self._described())

    def require_task(self, path: str, task: PoolingTask) -> None:
        """Raise ApiError 400 unless the model has this task."""
        if self.pooling is None or task not in self.pooling.tasks:
            what = "has a classification head" if task == "classify" else "makes vectors"
            raise _wrong_route(path, what, self._described())

    def require_pooling(self, path: str) -> None:
        """Raise ApiError 400 unless the model has any task of requests for vectors and scores."""
        if self.pooling is None:
            raise _wrong_route(path, "makes vectors or scores", self._described())

    def require_scoring(self, path: str) -> PoolingTask:
        """Return ``scoring_task``; raise ApiError 400 without one."""
        if self.scoring_task is None:
            raise _wrong_route(path, "makes vectors or has one label", self._described())
        return self.scoring_task

    def _described(self) -> str:
        """Return what the model can do, with the routes for it."""
        parts = [f"generate text ({GENERATION_ROUTES})"] if self.generates else []
        parts += [f"{task} ({ROUTES_OF_TASKS[task]})" for task in self.tasks if task in ROUTES_OF_TASKS]
        hint = "; --pooling last lets it make vectors" if self.pooling is None else ""
        return f"{', '.join(parts) or 'do nothing that a route is for'}{hint}"


def _wrong_route(path: str, needed: str, described: str) -> ApiError:
    text = f"{path} needs a model that {needed}: this model can {described}"
    return ApiError(400, text, "model", "unsupported_value")
