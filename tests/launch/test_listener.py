"""Addresses of the server: ports, unix sockets, TLS, a path prefix; and API keys that do not show."""

import os
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from front_end import FrontEnd, status_of

from quire.frontend.network_options import check_network, tls_context
from quire.frontend.serve_options import ServeOptions
from quire.launch.config.api_keys import read_api_keys
from quire.launch.listener import Listener
from quire.protocol.errors import ConfigError

TLS = Path(__file__).parent.parent / "data" / "tls"
CERTIFICATE, KEY = str(TLS / "certificate.pem"), str(TLS / "key.pem")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: a unix socket's path has at most 107 characters."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


class TestPort:
    @pytest.mark.parametrize("options", [(), (socket.SO_REUSEADDR,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)])
    def test_no_other_socket_can_listen_on_the_port(self, options: tuple[int, ...]) -> None:
        with Listener(ServeOptions(port=0)) as listener:
            port = listener.socket.getsockname()[1]
            with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is in use: set --host and --port"):
                Listener(ServeOptions(port=port)).close()
            for host in ("127.0.0.1", "0.0.0.0"):
                with socket.socket() as other:
                    for option in options:
                        other.setsockopt(socket.SOL_SOCKET, option, 1)
                    with pytest.raises(OSError, match="in use"):
                        other.bind((host, port))
                        other.listen()
        Listener(ServeOptions(port=port)).close()

    def test_the_url_of_an_ipv6_address_has_brackets(self) -> None:
        try:
            for host in ("::1", "[::1]"):
                with Listener(ServeOptions(host=host, port=0)) as listener:
                    assert listener.address == f"http://[::1]:{listener.socket.getsockname()[1]}"
        except ConfigError:
            pytest.skip("this machine has no IPv6")
        with pytest.raises(ConfigError, match=r"\[2001:db8::1\]:1 cannot be used"):
            Listener(ServeOptions(host="2001:db8::1", port=1))


class TestUnixSocket:
    def test_a_second_server_is_refused_and_a_left_over_file_replaced(self, folder: Path) -> None:
        path = folder / "quire.sock"
        options = ServeOptions(uds=str(path))
        with Listener(options) as listener:
            assert listener.address == f"unix:{path}"
            with pytest.raises(ConfigError, match=r"quire\.sock is in use: set --uds"):
                Listener(options)
            assert path.is_socket()
        assert not path.exists()
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(path))
        with Listener(options):
            pass

    def test_requests_are_served(self, folder: Path) -> None:
        with Listener(ServeOptions(uds=str(folder / "quire.sock"))) as listener:
            front_end = FrontEnd(listener=listener.socket)
            front_end.check()
            front_end.close()

    def test_another_file_is_never_removed(self, folder: Path) -> None:
        path = folder / "data"
        path.write_text("x")
        with pytest.raises(ConfigError, match="data is in use"):
            Listener(ServeOptions(uds=str(path)))
        assert path.read_text() == "x"
        with pytest.raises(ConfigError, match="cannot be used"):
            Listener(ServeOptions(uds=str(folder / ("x" * 200))))

    def test_the_umask_limits_access(self, folder: Path) -> None:
        before = os.umask(0o077)
        try:
            with Listener(ServeOptions(uds=str(folder / "s"))):
                assert stat.S_IMODE((folder / "s").stat().st_mode) == 0o700
        finally:
            os.umask(before)


@pytest.fixture(scope="module")
def front_end() -> Iterator[FrontEnd]:
    tls = tls_context(ServeOptions(ssl_certfile=CERTIFICATE, ssl_keyfile=KEY))
    front_end = FrontEnd(tls=tls, handshake_s=0.2)
    yield front_end
    front_end.check()
    front_end.close()


class TestTls:
    def test_the_certificate_is_presented(self, front_end: FrontEnd) -> None:
        context = ssl.create_default_context(cafile=CERTIFICATE)
        with httpx.Client(verify=context, base_url=f"https://127.0.0.1:{front_end.port}") as client:
            assert client.get("/health").status_code == 200
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"https://127.0.0.1:{front_end.port}/health")

    def test_refusals_below_the_application_are_sent(self, front_end: FrontEnd) -> None:
        context = ssl.create_default_context(cafile=CERTIFICATE)
        with (
            socket.create_connection(("127.0.0.1", front_end.port), 10) as raw,
            context.wrap_socket(raw, server_hostname="127.0.0.1") as connection,
        ):
            connection.sendall(b"GET /health HTTP/9\r\n\r\n")
            assert status_of(connection.recv(1000)) == 400

    def test_a_handshake_has_a_time_limit(self, front_end: FrontEnd) -> None:
        for data in (b"", b"\x16\x03\x01\x02\x00\x01"):
            assert front_end.ask(data) == b""

    def test_plain_http_is_not_served(self, front_end: FrontEnd) -> None:
        assert status_of(front_end.ask(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")) == 0

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"ssl_keyfile": KEY}, "--ssl-keyfile needs --ssl-certfile"),
            ({"ssl_certfile": CERTIFICATE}, "cannot be used"),
            ({"ssl_certfile": KEY, "ssl_keyfile": KEY}, "cannot be used"),
            ({"ssl_certfile": "/none.pem"}, r"/none.pem cannot be used: No such file"),
            ({"root_path": "quire"}, "--root-path must be a path such as /quire"),
            ({"root_path": "/a b"}, "--root-path must be"),
        ],
    )
    def test_unusable_settings_are_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            check_network(ServeOptions(**options))


def test_paths_are_served_with_and_without_the_prefix() -> None:
    front_end = FrontEnd(keys=("k",), settings={"root_path": "/quire/"})
    for path, status in (
        *(("/v1/models", 200), ("/quire/v1/models", 200), ("/quire/health", 200), ("/quire", 404)),
        *(("/quirev1/models", 404), ("/quire/quire/v1/models", 404), ("/quire//health", 404)),
    ):
        assert front_end.client.get(path).status_code == status, path
        if "health" not in path:
            assert front_end.client.get(path, headers={"authorization": "x"}).status_code == 401, path
    front_end.close()


class TestKeys:
    def test_keys_of_flags_and_file_are_added(self, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        file.write_text("first\n\n  second  \r\n")
        assert read_api_keys(ServeOptions(api_key=["zero"], api_key_file=str(file))) == ["zero", "first", "second"]

    def test_the_environment_is_the_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("QUIRE_API_KEY", "other")
        assert read_api_keys(ServeOptions()) == ["other"]
        assert read_api_keys(ServeOptions(api_key=["mine"])) == ["mine"]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "1 or more lines with a key"),
            (b"\n \n", "1 or more lines with a key"),
            (b"x" * (2**20 + 1), "at most 1 MiB"),
            (b"\xff\xfe", "UTF-8"),
            (b"a\x00b\n", "keys of --api-key must be printable"),
        ],
    )
    def test_a_file_without_usable_keys_is_refused(self, tmp_path: Path, content: bytes, message: str) -> None:
        file = tmp_path / "keys"
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            read_api_keys(ServeOptions(api_key_file=str(file)))

    @pytest.mark.parametrize("path", ["/none", "/", "/dev/zero"])
    def test_a_path_that_is_no_file_is_refused(self, path: str) -> None:
        with pytest.raises(ConfigError, match=f"--api-key-file {path}: (cannot be read|must have|must be)"):
            read_api_keys(ServeOptions(api_key_file=path))

    @pytest.mark.parametrize("words", [["--api-key", "s3cret", "second"], ["--admin-api-key=s3cret"]])
    def test_keys_do_not_show_in_the_command_line(self, words: list[str]) -> None:
        """The flag of a value that is refused afterwards, so that nothing starts; read by the program itself."""
        program = (
            "import atexit, sys; from pathlib import Path; from quire.launch.cli import main;"
            "atexit.register(lambda: print(Path('/proc/self/cmdline').read_bytes()));"
            "main(sys.argv[1:])"
        )
        command = [sys.executable, "-P", "-c", program, "serve", "--served-model-name", "s3cretly", *words]
        done = subprocess.run([*command, "--port", "-1"], capture_output=True, text=True)
        assert done.returncode == 78
        assert "api-key" in done.stdout and "--port" in done.stdout and "s3cretly" in done.stdout
        assert "s3cret\\x00" not in done.stdout and "second" not in done.stdout, done.stdout
