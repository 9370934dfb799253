"""The front-end process: ``python -P -m quire.frontend.http``. Only the supervisor starts it."""

import asyncio
import contextlib
import ctypes
import gc
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from starlette.types import ASGIApp

from quire.frontend.adapters.names import NameTable, table_path
from quire.frontend.adapters.reader import AdapterReader
from quire.frontend.adapters.served_adapters import ServedAdapters
from quire.frontend.engine.client import ZmqEngineClient
from quire.frontend.engine.several_client import SeveralEnginesClient
from quire.frontend.http.app import make_app
from quire.frontend.http.serving.http_server import HttpServer
from quire.frontend.http.serving.metrics import MetricsOptions
from quire.frontend.http.serving.peers import Peers
from quire.frontend.http.serving.server import FleetLink, ServerSettings
from quire.frontend.http.serving.tracing import OtlpTracer
from quire.frontend.http.stored.response_files import ResponseFiles
from quire.frontend.images.make import ItemReaders, make_readers
from quire.frontend.network_options import tls_context
from quire.frontend.serve_options import ServeOptions
from quire.frontend.sessions.session_store import SessionStore
from quire.frontend.text.parsing.choose_format import AnswerFormat
from quire.frontend.text.pooling.capabilities import Capabilities
from quire.frontend.text.probe import probe
from quire.frontend.text.text_in import TextIn
from quire.frontend.text.thinking import Thinking, answer_format
from quire.protocol.config import EngineConfig
from quire.protocol.errors import InvalidRequest, QuireError
from quire.protocol.process.child import Child, Report, child_parser, init_child
from quire.protocol.process.host_limits import resident_bytes
from quire.protocol.process.log import event_logger
from quire.protocol.request.plugins import load_logits_processors
from quire.protocol.wire.zmq_channel import check_socket_directory

log = event_logger("frontend")

FLUSH_S = 0.5
"""Time to send what sockets still buffer after the shutdown timeout."""
TICK_S = 1.0
GROWN_BYTES = 32 * 2**20
"""Growth of the resident memory from which an idle front end collects its garbage. A refused body is kept by the
exception that refused it, which no allocation follows that would cause a collection."""
COLLECT_AFTER = (10_000, 10, 5)
"""Arguments of gc.set_threshold. With Python's 700, the objects of one step of 2,048 streams cause several collections,
which free nothing. With a thousand streams a full collection takes 0.15 s, during which no stream gets a token. Cyclic
garbage is collected after at most 500,000 new objects."""


M_MMAP_THRESHOLD = -3
SWITCH_SECONDS = 5e-4
"""How long the event loop waits for a thread that reads a body or renders a conversation, instead of Python's 5 ms."""
LARGE_BLOCK = 256 * 1024
"""Bytes from which glibc gets a block from the system, and returns it when it is freed. By default, blocks up to 32 MiB
stay with the thread that has freed them, after the first one: each thread keeps the largest bodies that it has had."""


class FrontEnd:
    """One front-end process: the engine client, the HTTP server, and the supervisor's commands."""

    def __init__(self, directory: Path, index: int, child: Child) -> None:
        """``index``: index of this front end, from 0."""
        self._config = msgspec.msgpack.decode((directory / "config").read_bytes(), type=EngineConfig)
        self._settings = msgspec.json.decode((directory / "frontend").read_bytes(), type=ServeOptions)
        self._child = child
        self._directory, self._index = directory, index
        self._peers = Peers(directory, index, self._settings.api_server_count)
        self._engine = self._make_client()
        endpoint = self._settings.otlp_traces_endpoint
        self._tracer = OtlpTracer(endpoint) if endpoint else None
        self._draining = asyncio.Event()

    def _make_client(self) -> ZmqEngineClient | SeveralEnginesClient:
        """Return the client of one engine, or of several if the directory is that of a fleet."""
        config, directory = self._config, self._directory
        if not (directory / "router").exists():
            return ZmqEngineClient(directory, config.max_model_len, config.model.vocab_size, self._index)
        return SeveralEnginesClient(config, directory, self._index, self._settings.drain_timeout, self._report_drained)

    def _report_drained(self, engine: int) -> None:
        self._child.report(Report("drained", engine=engine))

    async def serve(self, listener: socket.socket) -> None:
        """Serve until the drain command. Then refuse new requests, let running ones finish, and abort the rest when
        the shutdown timeout is over."""
        config, engine = self._config, self._engine
        text_in = TextIn.load(Path(config.model_path), config.chat_template) if config.model_path else TextIn()
        thinking = Thinking.of(config, text_in)
        form = answer_format(thinking, self._settings, text_in)
        readers = make_readers(config, self._settings, text_in.read_images)
        server = self._make_server(text_in, thinking, form, readers)
        self._listening = await self._peers.listen(self._for_peers)
        self._take_commands()
        asyncio.get_running_loop().add_reader(self._child.fileno(), self._take_commands)
        async with asyncio.TaskGroup() as group:
            ready = self._get_ready(text_in, form, readers)
            tasks = [group.create_task(work) for work in (self._drain(server), self._tick(server), ready)]
            await self._wait_state_known()
            gc.collect()
            gc.freeze()  # objects of the start live as long as the process: collections skip them
            gc.set_threshold(*COLLECT_AFTER)
            await server.serve(sockets=[listener])
            for task in tasks:
                task.cancel()
        await engine.close()
        readers.close()
        text_in.close()
        if self._tracer is not None:
            self._tracer.close()

    def _make_server(
        self, text_in: TextIn, thinking: Thinking, form: AnswerFormat | None, readers: ItemReaders
    ) -> HttpServer:
        config, settings = self._config, self._settings
        app = make_app(
            self._engine,
            ServerSettings(
                text_in=text_in,
                processors=tuple(load_logits_processors(config.logits_processors, config.logits_processors_exclude)),
                thinking=thinking,
                answer_format=form,
                served_model_names=tuple(settings.served_model_name or ()),
                api_keys=tuple(settings.api_key or ()),
                admin_api_keys=tuple(settings.admin_api_key or ()),
                max_num_queued_reqs_per_key=settings.max_num_queued_reqs_per_key,
                health_timeout=settings.health_timeout,
                allowed_origins=tuple(settings.allowed_origins or ()),
                allowed_hosts=tuple(settings.allowed_hosts or ()),
                own_names=(settings.host,),
                tracer=self._tracer,
                metrics=MetricsOptions(
                    settings.metrics_prefix, self._directory, self._index, _cache_config(config), config.max_loras
                ),
                root_path=settings.root_path,
                sampling_defaults=config.sampling_defaults,
                unknown_fields=settings.unknown_fields,
                address_salt=self._directory.name.encode(),
                max_stored_response_bytes=settings.max_stored_response_bytes,
                response_files=ResponseFiles(self._directory / "responses", self._index),
                adapters=self._adapters(),
                notes_tools=config.uses_programs,
                sessions=SessionStore(settings.max_sessions, settings.session_timeout, self._index),
                moe=config.model.moe,
                capabilities=Capabilities(config.model.generates, config.model.pooling),
                images=readers.images,
                rows=readers.rows,
                implementation=config.model.implementation,
                architecture=config.model.architecture,
                peers=self._peers,
                fleet=self._fleet_link(),
            ),
        )
        self._note_sessions: Callable[[], None] = app.state.note_sessions
        self._for_peers: ASGIApp = app.state.for_peers
        self._continue_responses: Callable[[], Awaitable[None]] = app.state.continue_responses
        return HttpServer(app, tls_context(settings))

    def _adapters(self) -> ServedAdapters | None:
        config, folder = self._config, self._settings.lora_dir
        if not config.enable_lora:
            return None
        reader, table = AdapterReader(config.model, config.max_lora_rank), NameTable(table_path(self._directory))
        return ServedAdapters(reader, table, Path(folder) if folder else None)

    def _fleet_link(self) -> FleetLink | None:
        engine = self._engine
        if isinstance(engine, ZmqEngineClient):
            return None
        return FleetLink(lambda: engine.places, engine.is_usable, engine.statistics_by_engine, self._send_order)

    def _send_order(self, order: str, engine: int) -> None:
        self._child.report(Report("order", order, engine=engine))

    def _take_commands(self) -> None:
        for command in self._child.take_commands():
            match command.kind:
                case "scheduler" if isinstance(self._engine, ZmqEngineClient):
                    self._engine.connect(command.incarnation)
                case "engines" if isinstance(self._engine, SeveralEnginesClient):
                    self._engine.set_places(command.engines)
                case "router" if isinstance(self._engine, SeveralEnginesClient):
                    self._engine.connect_router(command.incarnation)
                case "drain" | "stop":
                    self._draining.set()
                case "engine_failed":
                    self._engine.fail("the engine stopped")
                    self._draining.set()

    async def _drain(self, server: HttpServer) -> None:
        await self._draining.wait()
        self._engine.drain()
        if not await self._engine.wait_idle(self._settings.shutdown_timeout):
            self._engine.shut_down("server_shutdown: the server is shutting down")
            await asyncio.sleep(FLUSH_S)
        server.should_exit = True

    async def _wait_state_known(self) -> None:
        """Wait until the engine's state is known, or draining starts.

        A restarted front end that served earlier would refuse requests which the other front ends accept.
        """
        known, draining = (
            asyncio.create_task(wait) for wait in (self._engine.wait_state_known(), self._draining.wait())
        )
        await asyncio.wait((known, draining), return_when=asyncio.FIRST_COMPLETED)
        known.cancel()
        draining.cancel()

    async def _get_ready(self, text_in: TextIn, form: AnswerFormat | None, readers: ItemReaders) -> None:
        """Report readiness. Then the first front end of all logs what the chat template loses of requests."""
        await self._engine.wait_ready()
        self._child.report(Report("ready"))
        await self._continue_responses()
        if readers.images is not None:
            await asyncio.to_thread(readers.images.prepare)
        if text_in.template is not None and self._config.model.generates:
            with contextlib.suppress(QuireError, InvalidRequest, OSError):  # it exists, or descriptors are exhausted
                (self._directory / "probed").touch(exist_ok=False)
                for loss in (await asyncio.to_thread(probe, text_in, form)).losses:
                    log.warning(loss)

    async def _tick(self, server: HttpServer) -> None:
        self._child.watch_progress(lambda: None)
        least, num_idle = resident_bytes(), 0
        while True:
            self._child.progress()
            self._note_sessions()
            # A thread may still work on a body after its response, so more than once, but ever more rarely.
            num_idle = 0 if server.server_state.tasks else num_idle + 1
            with contextlib.suppress(OSError):  # out of descriptors: this must not end the process, and its streams
                if num_idle.bit_count() == 1 and resident_bytes() > least + GROWN_BYTES:
                    gc.collect()
                least = min(least, resident_bytes())
            await asyncio.sleep(TICK_S)


def _cache_config(config: EngineConfig) -> dict[str, str]:
    """Return the labels of ``cache_config_info``, with vLLM's names."""
    return {
        "cache_dtype": config.kv_cache_dtype,
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": str(config.gpu_memory_utilization),
        "kv_cache_memory_bytes": str(config.kv_cache_memory_bytes or None),
        "num_gpu_blocks_override": str(config.num_blocks_override or None),
        "prefix_caching_hash_algo": config.prefix_caching_hash_algo,
        "sliding_window": str(max(config.model.windows, default=0) or None),
    }


def main() -> None:
    parser = child_parser(__doc__)
    parser.add_argument("--listen-fd", type=int, required=True)
    parser.add_argument("--index", type=int, required=True, help="index of this front end, from 0")
    args = parser.parse_args()
    child = init_child(args.status_fd, args.lifeline_fd, args.directory)
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
    try:
        check_socket_directory(args.directory)
        child.report(Report("started"))
        listener = socket.socket(fileno=args.listen_fd)
        sys.setswitchinterval(SWITCH_SECONDS)
        front_end = FrontEnd(args.directory, args.index, child)
        run = asyncio.run
        with contextlib.suppress(ImportError):
            import uvloop

            run = uvloop.run
        run(front_end.serve(listener))
    except Exception as error:
        child.fail(error)


if __name__ == "__main__":
    main()
