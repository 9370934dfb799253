"""The settings of ``quire serve`` other than the engine's."""

from typing import Annotated, Literal

from quire.frontend.images.options import ImageOptions
from quire.protocol.process.log import LogOptions
from quire.protocol.settings import ADAPTERS, Setting

SERVER = "Server"
LOGS = "Logs and metrics"
SCALE = "Engines and nodes"


class ServeOptions(ImageOptions, frozen=True, kw_only=True):
    """Settings of the server as a user gives them."""

    host: Annotated[str, Setting(SERVER, "address to listen on", metavar="HOST")] = "127.0.0.1"
    port: Annotated[int, Setting(SERVER, "port to listen on; 0: a free one", range=(0, 65535), metavar="PORT")] = 8000
    served_model_name: Annotated[
        list[str] | None,
        Setting(SERVER, "one or more names that clients may use", metavar="NAME", default="the folder's name"),
    ] = None
    api_key: Annotated[
        list[str] | None,
        Setting(
            SERVER, "one or more API keys accepted by the server", metavar="KEY", default="the variable QUIRE_API_KEY"
        ),
    ] = None
    api_key_file: Annotated[
        str | None,
        Setting(
            SERVER,
            "file with one API key per line, in addition to --api-key. Unlike an argument, it is not visible to other "
            "users of the machine",
            metavar="FILE",
        ),
    ] = None
    admin_api_key: Annotated[
        list[str] | None,
        Setting(
            SERVER,
            "one or more keys of the administrator's routes, which pause the server and show its requests; without a "
            "key they do not exist. No API key opens them: [administration](serving.md#administration)",
            metavar="KEY",
            default="the variable QUIRE_ADMIN_API_KEY",
        ),
    ] = None
    admin_api_key_file: Annotated[
        str | None,
        Setting(SERVER, "file with one key per line, in addition to --admin-api-key", metavar="FILE"),
    ] = None
    uds: Annotated[
        str | None,
        Setting(
            SERVER,
            "listen on a unix socket at this path instead of a port: [addresses](serving.md#addresses)",
            metavar="FILE",
        ),
    ] = None
    ssl_certfile: Annotated[
        str | None,
        Setting(
            SERVER, "serve HTTPS with this certificate chain, in PEM format: [TLS](serving.md#tls)", metavar="FILE"
        ),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        Setting(SERVER, "private key of the certificate, in PEM format", metavar="FILE", default="in --ssl-certfile"),
    ] = None
    root_path: Annotated[
        str,
        Setting(
            SERVER,
            "prefix of all paths behind a reverse proxy, such as /quire. Requests are served with and without it",
            metavar="PATH",
            default="none",
        ),
    ] = ""
    allowed_origins: Annotated[
        list[str] | None,
        Setting(
            SERVER,
            "origins of web pages that may use the server, such as https://chat.example.com; *: all. A page that the "
            "server itself has sent is always allowed: [web pages](serving.md#web-pages)",
            metavar="ORIGIN",
        ),
    ] = None
    allowed_hosts: Annotated[
        list[str] | None,
        Setting(
            SERVER,
            "names under which clients may address the server, in addition to addresses and private names; *: all. "
            "`*.NAME` allows all names below NAME. This protects a server without API keys from web pages that "
            "rebind a name: [web pages](serving.md#web-pages)",
            metavar="NAME",
            default="any with API keys",
        ),
    ] = None
    unknown_fields: Annotated[
        Literal["ignore", "refuse"],
        Setting(
            SERVER,
            "what to do with unknown fields of requests: ignore (one warning per name in the log) or refuse (400). The "
            "response header `x-quire-ignored-fields` names ignored fields. Unknown fields of messages are always "
            "ignored: [fields](../frontend/http/schema/README.md#fields)",
        ),
    ] = "ignore"
    max_stored_response_bytes: Annotated[
        int,
        Setting(
            SERVER,
            "memory of each front end for responses of /v1/responses that clients may refer to later by their ids, and "
            "the size of their files beside the server's sockets; the oldest are dropped first. 0: store none. "
            "Requests with `store: false` are not stored: "
            "[stored responses](../frontend/http/dialects/README.md#responses)",
            range=(0, 2**40),
            unit="bytes",
        ),
    ] = 64 * 2**20
    max_sessions: Annotated[
        int,
        Setting(
            SERVER,
            "maximum number of open sessions of each front end; further ones get 429: [sessions](sessions.md)",
            range=(0, 10**6),
        ),
    ] = 10_000
    session_timeout: Annotated[
        float,
        Setting(
            SERVER,
            "seconds without a piece after which a session ends: [sessions](sessions.md)",
            range=(1, 10**7),
            metavar="SECONDS",
        ),
    ] = 3600.0
    max_num_queued_reqs_per_key: Annotated[
        int,
        Setting(
            SERVER,
            "maximum number of answers per API key (without keys, per client address) that wait for their first token; "
            "further requests get 429; 0: no limit. The 429 response has `Retry-After`",
            range=(0, 2**31 - 1),
        ),
    ] = 0
    api_server_count: Annotated[
        int,
        Setting(
            SERVER,
            "number of front-end processes that share the port. When one dies, streams of the others continue. "
            "Metrics are summed over all of them; limits per key and on connections are separate for each process",
            range=(1, 64),
        ),
    ] = 1
    standby_workers: Annotated[
        bool,
        Setting(
            SERVER,
            "keep a standby process per worker, which replaces it when it dies. A standby has done its imports and "
            "needs about 200 MB. With --nodes there are none",
        ),
    ] = True
    health_timeout: Annotated[
        float,
        Setting(
            SERVER,
            "seconds without any token while requests wait, after which /health is 503. The same limit applies to a "
            "recovery; `/ready` becomes 503 too",
            range=(0.1, 86400),
            metavar="SECONDS",
        ),
    ] = 60.0
    shutdown_timeout: Annotated[
        float,
        Setting(
            SERVER,
            "seconds that running requests have to finish after SIGTERM. A second signal, from 1 s later on, stops it",
            range=(0, 86400),
            metavar="SECONDS",
        ),
    ] = 30.0
    lora_modules: Annotated[
        list[str] | None,
        Setting(
            ADAPTERS,
            "one or more LoRA adapters and the names by which requests ask for them as their model. They are checked "
            "at the start: [adapters](adapters.md)",
            metavar="NAME=FOLDER",
        ),
    ] = None
    lora_dir: Annotated[
        str,
        Setting(
            ADAPTERS,
            "folder whose folders are LoRA adapters, named as they are. Each is read when a request asks for it",
            metavar="DIR",
            default="none",
        ),
    ] = ""
    data_parallel_size: Annotated[
        int,
        Setting(
            SCALE,
            "number of engines, each with its own scheduler, workers and KV cache, behind one router: "
            "[several engines](scale.md). 1: one engine and no router",
            range=(1, 64),
        ),
    ] = 1
    routing: Annotated[
        Literal["cache", "least-load", "round-robin", "session"],
        Setting(
            SCALE,
            "how requests are routed to engines: cache (to the engine with the least left to compute, by the contents "
            "of its KV cache and its queue), least-load, round-robin, or session (to the engine that had the last "
            "request of the same job): [routing](scale.md#routing)",
            metavar="POLICY",
        ),
    ] = "cache"
    drain_timeout: Annotated[
        float,
        Setting(
            SCALE,
            "seconds that requests have to finish on an engine that is drained, after which they are moved to others",
            range=(0, 86400),
            metavar="SECONDS",
        ),
    ] = 10.0
    nodes: Annotated[
        list[str] | None,
        Setting(
            SCALE,
            "machines that run the workers: addresses of `quire node` such as tcp://10.0.0.5:7100, dns:NAME:PORT for "
            "all addresses of a name, or ray: [several machines](scale.md#several-machines)",
            metavar="NODE",
            default="this machine",
        ),
    ] = None
    node_keys: Annotated[
        str,
        Setting(
            SCALE,
            "directory of the CURVE keys for the links to nodes: [keys](scale.md#keys)",
            metavar="DIR",
            default="none",
        ),
    ] = ""
    tool_call_parser: Annotated[
        Literal[
            "auto",
            "none",
            "deepseek_v3",
            "deepseek_v31",
            "gemma4",
            "glm45",
            "harmony",
            "hermes",
            "llama3_json",
            "mistral",
            "mistral_list",
            "qwen3_coder",
        ],
        Setting(
            SERVER,
            "format in which the model writes tool calls. auto: that of the checkpoint's `response_template`, or the "
            "one that its chat template has: [formats](../frontend/text/parsing/README.md#formats). none: calls are "
            "text",
            metavar="NAME",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "markers", "gemma4", "harmony"],
        Setting(
            SERVER,
            "format in which the model writes thoughts, which responses have as `reasoning`. markers: between "
            "`--reasoning-start-str` and `--reasoning-end-str`. none: thoughts are text",
            metavar="NAME",
        ),
    ] = "auto"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        Setting(
            LOGS,
            "lowest level of the log lines. info: requests, responses, throughput; debug: also health checks, "
            "scrapes and scheduling decisions",
            default="the variable QUIRE_LOG_LEVEL, or warning",
        ),
    ] = None
    log_format: Annotated[
        Literal["text", "json"] | None,
        Setting(
            LOGS,
            "form of a log line: text, or one JSON object per line. All processes of the engine use it",
            default="the variable QUIRE_LOG_FORMAT, or text",
        ),
    ] = None
    metrics_prefix: Annotated[
        str,
        Setting(
            LOGS,
            "prefix of metric names. `vllm` fits dashboards and alerts written for vLLM: names, labels and units of "
            "common metrics are the same",
            metavar="NAME",
        ),
    ] = "quire"
    otlp_traces_endpoint: Annotated[
        str,
        Setting(
            LOGS,
            "OTLP collector that gets an OpenTelemetry span per request, such as http://localhost:4318/v1/traces. "
            "Needs the extra `otel`: [traces of requests](observability.md#traces-of-requests)",
            metavar="URL",
            default="none",
        ),
    ] = ""
    simulate: Annotated[
        str | None,
        Setting(
            SERVER,
            "simulate workers with a cost model: table:DIR, roofline:CONFIG,CHIP, fitted:FILE or constant:MS. Answers "
            "are random tokens, and MODEL needs no weights: [traces](traces.md)",
            metavar="COST",
        ),
    ] = None

    @property
    def logs(self) -> LogOptions:
        return LogOptions.of(self.log_level, self.log_format)
