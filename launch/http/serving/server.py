"""What every handler is given: the engine, the text side, and the settings they were started with."""

import time
from dataclasses import dataclass, field

from quire.launch.frontend.engine_client import EngineClient
from quire.launch.http.schema.errors import ApiError
from quire.launch.http.schema.schema import Parser
from quire.launch.http.serving.key_queues import KeyQueues
from quire.launch.http.serving.lanes import ConversationLanes, TextLanes
from quire.launch.http.serving.metrics import Metrics
from quire.launch.http.serving.thinking import Thinking
from quire.launch.text.text_in import TextIn
from quire.launch.text.text_out import TokenTexts
from quire.protocol.errors import ConfigError
from quire.protocol.request.logits_processors import LogitsProcessor
from quire.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How one front end serves.

    Attributes:
        served_model_names: the first is the one that answers bear.
        processors: the engine's logits processors, which are asked about each request.
        thinking: the engine's markers.
        api_keys: any of them opens every route; with none, everything is open.
        max_num_queued_reqs_per_key: answers of one key that may wait for their first token; 0: any number.
        health_timeout: seconds without progress from which on the engine counts as stuck.
    """

    text_in: TextIn
    served_model_names: tuple[str, ...]
    processors: tuple[type[LogitsProcessor], ...] = ()
    thinking: Thinking = field(default_factory=Thinking)
    api_keys: tuple[str, ...] = ()
    max_num_queued_reqs_per_key: int = 0
    health_timeout: float = 60.0
    version: str = __version__
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        """Raises ConfigError for a key that matches requests without one, or that cannot be sent."""
        for key in self.api_keys:
            if not key or key != key.strip() or not key.isprintable():
                raise ConfigError("an API key must not be empty, nor begin or end with a space, nor have line breaks")
        if self.max_num_queued_reqs_per_key < 0:
            raise ConfigError("max_num_queued_reqs_per_key must not be negative")


class Server:
    """The engine and all that stands around it, for the handlers of one application."""

    def __init__(self, engine: EngineClient, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.text_in = settings.text_in
        self.token_texts = TokenTexts(settings.text_in.tokenizer)
        self.texts = TextLanes()
        self.conversations = ConversationLanes(settings.text_in)
        self.parser = Parser(served_names=settings.served_model_names, limits=engine, processors=settings.processors)
        self.metrics = Metrics(settings.served_model_names[0])
        self.key_queues = KeyQueues(settings.max_num_queued_reqs_per_key)

    @property
    def is_stuck(self) -> bool:
        """No token has come for too long although one is waited for, or the engine has been recovering for so long."""
        return self.engine.seconds_without_progress > self.settings.health_timeout

    def require_serving(self) -> None:
        """Raises ApiError 503 unless new requests are taken. A recovering engine takes them and lets them wait."""
        if self.engine.state not in ("ready", "recovering"):
            raise ApiError(503, f"the engine is {self.engine.state}", None, "engine_unavailable")
