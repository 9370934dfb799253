"""A server of this command's own: the engine and one front end, on a unix socket in a private directory."""

import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from quire.frontend.serve_options import ServeOptions
from quire.launch.config.adapter_options import with_adapters
from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.model_folder import find_model
from quire.launch.config.options import EngineOptions
from quire.launch.listener import Listener
from quire.launch.serve import model_display_name, server_adapters, write_settings
from quire.launch.supervision.directory import parent_of_sockets
from quire.launch.supervision.supervisor import FrontEndModule, Supervisor

T = TypeVar("T")


def with_server(engine: EngineOptions, options: ServeOptions, work: Callable[[str], T], stop: Callable[[], None]) -> T:
    """Start a server, return ``work(path)`` with the path of its socket, and end it.

    Args:
        work: runs in a thread of its own.
        stop: makes ``work`` return soon.

    Raises:
        ConfigError, EngineError: the engine cannot start, or cannot continue.
    """
    engine, options = with_adapters(engine, options)
    folder = find_model(engine.model)
    config = make_engine_config(engine, folder=folder)
    names = options.served_model_name or [model_display_name(folder, engine.model)]
    done: list[T] = []
    failed: list[BaseException] = []
    with tempfile.TemporaryDirectory(prefix="quire-batch-", dir=parent_of_sockets()) as private:
        path = str(Path(private) / "socket")
        # Nothing refers to a response of another line, because lines are answered in any order.
        options = msgspec.structs.replace(options, uds=path, served_model_name=names, max_stored_response_bytes=0)
        adapters = server_adapters(config, options)
        with Listener(options) as listener:
            fd = listener.socket.fileno()
            front_end = FrontEndModule("quire.frontend.http", 1, ("--listen-fd", str(fd)), (fd,))
            with Supervisor(config, quiet=True, front_end=front_end) as supervisor:
                write_settings(supervisor.directory, options, adapters)
                supervisor.start_all()
                while not supervisor.is_ready:
                    supervisor.watch(None)

                def run() -> None:
                    try:
                        done.append(work(path))
                    except BaseException as error:
                        failed.append(error)
                    finally:
                        os.write(supervisor.wakeup_fd, b"x")

                thread = threading.Thread(target=run, name="batch")
                thread.start()
                try:
                    while not done and not failed:
                        supervisor.watch(None)
                finally:
                    stop()
                    thread.join()
    if failed:
        raise failed[0]
    return done[0]
