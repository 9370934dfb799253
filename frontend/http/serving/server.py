"""Server: the state that every handler gets: engine client, text processing, settings."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from starlette.types import ASGIApp, Scope

from quire.frontend.adapters.served_adapters import ServedAdapters
from quire.frontend.engine.client import EngineClient
from quire.frontend.engine.terms import NO_TERMS, Terms
from quire.frontend.http.schema.bodies import ForkBody
from quire.frontend.http.schema.errors import ApiError
from quire.frontend.http.schema.schema import Parser
from quire.frontend.http.schema.unknown_fields import Policy, UnknownFields
from quire.frontend.http.serving.access_log import ANSWERED
from quire.frontend.http.serving.gate import TENANT
from quire.frontend.http.serving.key_queues import KeyQueues, WaitingSequences
from quire.frontend.http.serving.metrics import Metrics, MetricsOptions
from quire.frontend.http.serving.peers import Peers
from quire.frontend.http.serving.tracing import OtlpTracer, RequestSpan
from quire.frontend.http.serving.work_threads import ConversationThreads, TextThreads
from quire.frontend.http.stored.response_files import ResponseFiles
from quire.frontend.http.stored.response_store import OwnResponses, ResponseStore
from quire.frontend.ids import new_id
from quire.frontend.images.given_rows import RowsReader
from quire.frontend.images.reader import ImageReader
from quire.frontend.sessions.session_store import SessionStore
from quire.frontend.text.parsing.choose_format import AnswerFormat
from quire.frontend.text.pooling.capabilities import Capabilities
from quire.frontend.text.pooling.inputs import InputEncoder
from quire.frontend.text.text_in import TextIn
from quire.frontend.text.text_out import TokenTexts
from quire.frontend.text.thinking import Thinking
from quire.protocol.errors import ConfigError
from quire.protocol.model.model_config import MoeConfig
from quire.protocol.request.logits_processors import LogitsProcessor
from quire.protocol.routing import EnginePlace
from quire.protocol.wire.front_end_messages import Statistics
from quire.version import __version__


@dataclass(frozen=True, slots=True)
class FleetLink:
    """What the administrator's routes need of a server with several engines.

    Attributes:
        places: returns the engines as the fleet announced them last.
        is_usable: returns whether an engine can compute new requests now.
        statistics: returns the statistics of the engines that answer.
        order: sends an order (protocol/process/fleet_orders.py), and the number of an engine or ALL, to the fleet.
    """

    places: Callable[[], Sequence[EnginePlace]]
    is_usable: Callable[[int], bool]
    statistics: Callable[[], Awaitable[Mapping[int, Statistics]]]
    order: Callable[[str, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of one front end.

    Attributes:
        served_model_names: names accepted in requests; responses have the first one.
        processors: the engine's logits processors, which validate each request.
        thinking: the model's thinking markers.
        answer_format: how the model writes thoughts and calls; None if its answers are plain text.
        api_keys: keys accepted on every route but the administrator's; if empty, requests need no key.
        admin_api_keys: keys accepted on the administrator's routes; if empty, there are none.
        max_num_queued_reqs_per_key: most sequences of one key that wait for their first token, or 0 for no limit.
        health_timeout: seconds without progress after which the engine counts as stuck.
        allowed_origins, allowed_hosts: origins of web pages, and host names, that may use the server (origins.py).
        own_names: host names of this server.
        metrics: names of the metrics, and where the front ends share them.
        address_salt: makes the tenants of addresses unpredictable; the same in all front ends.
        tracer: receives a span per request.
        root_path: prefix of all paths behind a reverse proxy, or "".
        sampling_defaults: the model's sampling parameters, for requests that leave them out.
        unknown_fields: what to do with fields of requests that the server does not know.
        max_stored_response_bytes: memory for responses that clients may refer to later, or 0 to store none.
        response_files: where responses are stored for other front ends; None: nowhere.
        peers: the other front ends, and the number of this one.
        fleet: the engines of the server, for the administrator; None: it has one.
        adapters: the adapters that requests may name as their model; None: the engine has none.
        notes_tools: whether the scheduler wants to know which tools answers call.
        sessions: the open sessions of this front end.
        moe: the model's layers with experts; None: it has none.
        capabilities: what the model can do.
        images: reads the images of messages; None: the model reads none.
        rows: reads prompts given as embeddings; None: they are refused.
        implementation: what computes the model (``ModelConfig.implementation``).
        architecture: of the model (``ModelConfig.architecture``).
    """

    text_in: TextIn
    served_model_names: tuple[str, ...]
    processors: tuple[type[LogitsProcessor], ...] = ()
    thinking: Thinking = field(default_factory=Thinking)
    answer_format: AnswerFormat | None = None
    api_keys: tuple[str, ...] = ()
    admin_api_keys: tuple[str, ...] = ()
    max_num_queued_reqs_per_key: int = 0
    health_timeout: float = 60.0
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    own_names: tuple[str, ...] = ()
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    tracer: OtlpTracer | None = None
    root_path: str = ""
    sampling_defaults: Mapping[str, int | float] = field(default_factory=dict)
    unknown_fields: Policy = "ignore"
    address_salt: bytes = b""
    max_stored_response_bytes: int = 64 * 2**20
    response_files: ResponseFiles | None = None
    peers: Peers = field(default_factory=Peers)
    fleet: FleetLink | None = None
    adapters: ServedAdapters | None = None
    notes_tools: bool = False
    sessions: SessionStore = field(default_factory=SessionStore)
    moe: MoeConfig | None = None
    capabilities: Capabilities = field(default_factory=Capabilities)
    images: ImageReader | None = None
    rows: RowsReader | None = None
    implementation: str = "native"
    architecture: str = "QuireForCausalLM"
    version: str = __version__
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        """Raise ConfigError for a key that would match a request without one, or that no header can contain."""
        for key in (*self.api_keys, *self.admin_api_keys):
            if not key or key != key.strip() or not key.isprintable():
                raise ConfigError("API keys must be printable, not empty, and not start or end with a space")
        if self.max_num_queued_reqs_per_key < 0:
            raise ConfigError(
                f"max_num_queued_reqs_per_key must be at least 0 (got {self.max_num_queued_reqs_per_key})"
            )


class Forkable(Protocol):
    """A request whose answers are generated now."""

    terms: Terms

    def fork(self, body: ForkBody, request_id: str) -> ASGIApp:
        """Return the response to answers that begin with what one of these has so far.

        Raises:
            InvalidRequest: the fork is not possible.
        """
        ...


class Server:
    """The engine client and the shared objects of one application's handlers."""

    def __init__(self, engine: EngineClient, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.text_in = settings.text_in
        self.token_texts = TokenTexts(settings.text_in.tokenizer)
        self.texts = TextThreads(settings.text_in)
        self.conversations = ConversationThreads(settings.text_in)
        self.parser = Parser(
            served_names=settings.served_model_names,
            others=settings.adapters,
            limits=engine,
            processors=settings.processors,
            defaults=settings.sampling_defaults,
            unknown_fields=UnknownFields(settings.unknown_fields),
            writer=None if settings.answer_format is None else settings.answer_format.writer,
            reads_images=settings.images is not None,
            rows=settings.rows,
        )
        self.capabilities = settings.capabilities
        self.metrics = Metrics(settings.served_model_names[0], settings.metrics)
        self.response_store = ResponseStore(settings.max_stored_response_bytes, settings.response_files)
        self.peers = settings.peers
        self.sessions = settings.sessions
        self.running: dict[str, Forkable] = {}
        """By id of the response."""
        self.key_queues = KeyQueues(settings.max_num_queued_reqs_per_key)

    @cached_property
    def input_encoder(self) -> InputEncoder:
        """The encoder of inputs for vectors and scores. Raises InvalidRequest if the model makes none."""
        return InputEncoder(self.text_in, self.engine, self.capabilities.require_pooling("/pooling"))

    @property
    def status(self) -> str:
        """The engine's state, or ``stuck``, or ``paused`` while it would accept requests otherwise."""
        if self.is_stuck:
            return "stuck"
        is_paused = self.engine.pause_kind and self.engine.state in ("ready", "recovering")
        return "paused" if is_paused else self.engine.state

    @property
    def is_stuck(self) -> bool:
        """Whether requests have got no token, or a recovery has lasted, for longer than ``health_timeout``."""
        return self.engine.seconds_without_progress > self.settings.health_timeout

    def new_id(self, prefix: str, given: str = "") -> str:
        """Return a unique id; see ``ids.new_id``."""
        return new_id(prefix, self.peers.index, given)

    def note_sessions(self) -> None:
        """End the sessions that have been idle for too long, and set the metrics of the others."""
        self.sessions.expire()
        self.metrics.set_sessions(self.sessions.num_open, self.sessions.num_idle, self.sessions.num_bytes)

    def of_client(self, terms: Terms, scope: Scope) -> Terms:
        """Return the terms of a request from the client that has sent it."""
        return replace(terms, tenant=scope["state"][TENANT])

    def responses_of(self, scope: Scope, connection: object | None = None) -> OwnResponses:
        """Return what the client of a request, or of a ``connection`` that keeps responses of its own, has stored."""
        return OwnResponses(self.response_store, scope["state"][TENANT], connection)

    def enter_queue(self, terms: Terms, num_sequences: int) -> WaitingSequences:
        """As ``KeyQueues.enter``."""
        return self.key_queues.enter(terms.tenant, num_sequences)

    def note_end(self, scope: Scope, ended: RequestSpan) -> None:
        """Note in the log line of a response what it was, and send its span."""
        if (answered := scope["state"].get(ANSWERED)) is not None:
            answered.request_id, answered.engines = ended.request_id, ended.engines
            answered.prompt_tokens, answered.output_tokens = ended.prompt_tokens, ended.output_tokens
            answered.finish = ",".join(ended.finish_reasons)
        if self.settings.tracer is not None:
            self.settings.tracer.record(scope["headers"], ended)

    def log_fields(self, model: str) -> dict[str, Any]:
        """Return what a log line says of the model that a request names: the adapter, if it is one."""
        return {} if model in self.settings.served_model_names else {"adapter": model}

    async def for_model(self, name: str, terms: Terms) -> Terms:
        """Return the terms of a request that names this model: with its adapter, or without one for the served model.

        Raises:
            InvalidRequest: as ``ServedAdapters.find``.
        """
        if self.settings.adapters is None or name in self.settings.served_model_names:
            return terms
        return replace(terms, adapter=await self.settings.adapters.find(name))

    async def check_model(self, name: str) -> None:
        """Raise InvalidRequest, as ``for_model``, unless a request may name this model."""
        await self.for_model(name, NO_TERMS)

    def require_generation(self, path: str) -> None:
        """Raise InvalidRequest unless the model generates text, ApiError 503 unless new requests are accepted."""
        self.capabilities.require_generation(path)
        self.require_serving()

    def require_serving(self) -> None:
        """Raise ApiError 503 unless new requests are accepted. While the engine recovers, they wait."""
        if self.engine.state not in ("ready", "recovering"):
            raise ApiError(503, f"engine not available (state: {self.engine.state})", None, "engine_unavailable")
