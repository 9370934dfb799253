"""Start the front-end process: ``python -P -m quire.launch.http``, by the supervisor only."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import uvicorn

from quire.launch.client import ZmqEngineClient
from quire.launch.http.app import make_app
from quire.launch.http.server import ServerSettings
from quire.launch.http.socket_protocol import BoundedHttpProtocol
from quire.launch.http.thinking import Thinking
from quire.launch.serve import FrontEndSettings
from quire.launch.text_in import TextIn
from quire.protocol.child import Child, Report, child_parser, enter_child
from quire.protocol.config import EngineConfig
from quire.protocol.plugins import load_logits_processors
from quire.protocol.zmq_channel import check_socket_directory

ABORT_GRACE = 2.0


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: SIGTERM here means drain, then end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(directory: Path, listener: socket.socket, child: Child) -> None:
    """Serve until SIGTERM; then refuse new requests, let running ones finish, abort what is left, and return.

    SIGUSR1 says that the engine is gone: every stream ends with an error at once.
    """
    config = msgspec.msgpack.decode((directory / "config").read_bytes(), type=EngineConfig)
    settings = msgspec.json.decode((directory / "frontend").read_bytes(), type=FrontEndSettings)
    processors = load_logits_processors(config.logits_processors)
    text_in = TextIn.load(Path(config.model_path)) if config.model_path else TextIn()
    engine = ZmqEngineClient(directory, config.max_model_len, config.model.vocab_size)
    await engine.connect()
    app = make_app(
        engine,
        ServerSettings(
            text_in=text_in,
            processors=tuple(processors),
            thinking=Thinking.of(config, text_in),
            served_model_names=tuple(settings.served_model_names),
            api_keys=tuple(settings.api_keys),
        ),
    )
    server = HttpServer(
        uvicorn.Config(app, http=BoundedHttpProtocol, log_level="warning", access_log=False, lifespan="off")
    )
    draining = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, draining.set)

    async def drain() -> None:
        await draining.wait()
        if engine.state != "failed":
            engine.state = "draining"
        if not await engine.wait_idle(settings.shutdown_timeout):
            engine.abort_all()
            await engine.wait_idle(ABORT_GRACE)
        server.should_exit = True

    def engine_died() -> None:
        engine.fail("the engine stopped")
        draining.set()

    # Told by the supervisor, since a scheduler that was killed says nothing.
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, engine_died)
    drainer = asyncio.create_task(drain())
    child.report(Report("ready"))
    await server.serve(sockets=[listener])
    drainer.cancel()
    await engine.close()


def main() -> None:
    parser = child_parser(__doc__)
    parser.add_argument("--listen-fd", type=int, required=True)
    args = parser.parse_args()
    child = enter_child(args.status_fd, args.lifeline_fd, args.directory)
    try:
        check_socket_directory(args.directory)
        child.report(Report("started"))
        listener = socket.socket(fileno=args.listen_fd)
        run = asyncio.run
        with contextlib.suppress(ImportError):
            import uvloop

            run = uvloop.run
        run(serve(args.directory, listener, child))
    except Exception as error:
        child.fail(error)


if __name__ == "__main__":
    main()
