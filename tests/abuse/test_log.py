"""A log that cannot be written (F31), and client text that tries to forge log lines (A55, A56)."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from front_end import EndlessEngine, FrontEnd
from served import QUIRE
from tiers import thinned

from quire.frontend.http.schema.errors import as_api_error

COMPLETIONS = "/v1/completions"
WAIT_S = 60.0
# Client text that tries to forge a log line or to control a terminal.
INJECTIONS = (
    *("\nERROR: all is lost", "\r\nINFO: all is well", "\r overwritten", "\x1b[2J\x1b[H", "\x1b]0;title\x07"),
    *("\x1b[31mred", "\x9b31m", "\x00", "\x07", "\x08\x08\x08", "\x7f", "\x85next line", "\u2028line"),
    *("\u2029paragraph", "\u202eright to left", "\u200bzero width", "\ufeffmark", "\ud800", "\x0c", "\x0b"),
    *("\x1c\x1d\x1e", "%s%n%(name)s", "{0.__class__}", "x" * 10**6),
)


class FailingEngine(EndlessEngine):
    """Raises an error with the text of a client."""

    client_text = ""

    async def add(self, *rest: Any, **more: Any) -> Any:
        if self.client_text:
            raise RuntimeError(f"cannot handle {self.client_text}")
        return await super().add(*rest, **more)


@pytest.fixture(scope="module")
def front_end() -> Iterator[FrontEnd]:
    made = FrontEnd(FailingEngine())
    yield made
    made.engine.client_text = ""  # type: ignore[attr-defined]
    made.check()
    made.close()


class TestInjection:
    @pytest.mark.parametrize("words", thinned(INJECTIONS, keep=4), ids=range(len(INJECTIONS)))
    def test_error_message_cannot_start_a_log_line(self, words: str, caplog: pytest.LogCaptureFixture) -> None:
        """Errors of libraries repeat text of the client."""
        try:
            try:
                raise KeyError(words)
            except KeyError as first:
                raise RuntimeError(f"cannot handle {words}") from first
        except RuntimeError as error:
            answer = as_api_error(error)
        assert (answer.status, answer.message) == (500, "internal error")
        assert caplog.text.count("\n") == 1
        assert "RuntimeError: cannot handle" in caplog.text and "test_log.py" in caplog.text
        assert caplog.text.strip("\n").isprintable() and len(caplog.text) < 5000

    @pytest.mark.parametrize("words", thinned(INJECTIONS, keep=4), ids=range(len(INJECTIONS)))
    def test_client_text_cannot_start_a_log_line(
        self, front_end: FrontEnd, words: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        front_end.engine.client_text = words  # type: ignore[attr-defined]
        for stream in (False, True):
            response = front_end.client.post(COMPLETIONS, json={"prompt": [1], "stream": stream})
            assert response.json()["error"]["message"] == "internal error"
        assert caplog.records
        for record in caplog.records:
            text = logging.Formatter().format(record)
            assert text.isprintable()


def full_disk(port: int, folder: Path) -> subprocess.Popen[bytes]:
    with Path("/dev/full").open("wb") as full:
        return start(port, stderr=full)


def closed(port: int, folder: Path) -> subprocess.Popen[bytes]:
    return start(port, preexec_fn=lambda: os.close(2))


def all_three_closed(port: int, folder: Path) -> subprocess.Popen[bytes]:
    return start(port, preexec_fn=lambda: [os.close(fd) for fd in range(3)])


def closed_pipe(port: int, folder: Path) -> subprocess.Popen[bytes]:
    read, write = os.pipe()
    os.close(read)
    try:
        return start(port, stderr=write)
    finally:
        os.close(write)


def file_at_its_limit(port: int, folder: Path) -> subprocess.Popen[bytes]:
    """A file size limit, which behaves like a disk that becomes full."""
    import resource

    log = folder / "log"
    log.write_bytes(b"x" * 4096)
    with log.open("ab") as file:
        return start(port, stderr=file, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)))


def start(port: int, **how: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*QUIRE, "serve", "--port", str(port), "--simulate", "constant:1"], **how)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("begin", [full_disk, closed, all_three_closed, closed_pipe, file_at_its_limit])
def test_server_continues_without_a_log(begin: Callable[[int, Path], subprocess.Popen[bytes]], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = begin(port, tmp_path)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S) as client:
            wait_ready(client, process)
            body = {"prompt": [5, 6, 7], "max_tokens": 20, "seed": 1}
            right = client.post(COMPLETIONS, json=body).json()["choices"]
            for _ in range(50):  # each is logged
                with socket.create_connection(("127.0.0.1", port), WAIT_S) as connection:
                    connection.sendall(b"garbage\r\n\r\n")
                    connection.recv(1000)
            assert client.post(COMPLETIONS, json=body).json()["choices"] == right
            with client.stream("POST", COMPLETIONS, json={**body, "max_tokens": 400, "stream": True}) as stream:
                lines = stream.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)  # logged
                assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(WAIT_S) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def wait_ready(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        assert process.poll() is None and time.monotonic() < deadline
        with contextlib.suppress(httpx.TransportError):
            if client.get("/ready").status_code == 200:
                return
        time.sleep(0.05)


def test_python_survives_an_unwritable_log() -> None:
    """The test above relies on this: an error in writing the log is ignored."""
    code = "import logging; logging.getLogger('quire.http').error('x'); print('alive')"
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-c", code], stderr=full, stdout=subprocess.PIPE, timeout=WAIT_S)
    assert done.stdout == b"alive\n"
