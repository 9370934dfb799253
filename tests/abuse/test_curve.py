"""KV events over TCP: only clients with an allowed CURVE key can connect."""

import contextlib
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zmq
from curve_files import make_keys, set_curve_keys
from kv_event_ends import WAIT_MS, keys_of, layout_of
from loop_under_test import LoopUnderTest
from scheduler_driver import make_config
from tiers import thinned
from zmq.auth import create_certificates
from zmq.utils.monitor import recv_monitor_message

from quire.protocol.errors import ConfigError
from quire.protocol.wire import connection_limit
from quire.protocol.wire.connection_limit import MAX_CONNECTIONS
from quire.protocol.wire.curve_keys import ALLOWED, SECRET, load_curve_keys
from quire.protocol.wire.kv_events import END, TOPIC, check_endpoints
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.process.kv_event_feeds import KVEventFeeds
from quire.scheduler_proc.process.kv_event_publisher import KVEventPublisher

FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
ZERO = (0).to_bytes(8, "big")


class Setup(NamedTuple):
    """A publisher over TCP that allows the keys of two clients, with its endpoints and folders."""

    publisher: KVEventPublisher
    events: str
    replay: str
    keys: Path
    folder: Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def context() -> Iterator["zmq.Context[Any]"]:
    with zmq.Context() as context:
        yield context


@pytest.fixture(scope="module")
def setup(context: "zmq.Context[Any]", tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("curve")
    keys = make_keys(folder / "keys", "router", "other")
    create_certificates(folder, "stranger")
    create_certificates(folder, "false_server")
    events, replay = f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
    publisher = KVEventPublisher(context, events, replay, 7, curve_dir=str(keys))
    feeds = KVEventFeeds([publisher], 7)
    pool = BlockPool(40, enable_caching=True, events=feeds.record(layout_of(4), 32))
    assert not keys_of(pool)
    feeds.publish(0.0)
    yield Setup(publisher, events, replay, keys, folder)
    publisher.close()


@contextlib.contextmanager
def strangers(endpoint: str, count: int) -> Iterator[list[socket.socket]]:
    """Open connections that send nothing."""
    host, _, port = endpoint.removeprefix("tcp://").partition(":")
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(count)]


def open_ones(connections: list[socket.socket]) -> int:
    """Return the number of connections that the engine has not closed."""
    for connection in connections:
        connection.setblocking(False)

    def is_open(connection: socket.socket) -> bool:
        try:
            while connection.recv(1000):  # a greeting
                pass
        except BlockingIOError:
            return True
        except ConnectionError:
            pass
        return False

    return sum(map(is_open, connections))


SetKeys = Callable[["zmq.Socket[Any]", Setup], None]


def key(name: str, server: str = "keys/server.key") -> SetKeys:
    return lambda client, setup: set_curve_keys(client, setup.folder / f"{name}.key_secret", setup.folder / server)


def plain(client: "zmq.Socket[Any]", setup: Setup) -> None:
    client.plain_username, client.plain_password = b"router", b"router"


def half(client: "zmq.Socket[Any]", setup: Setup) -> None:
    """An allowed public key with the secret of another key."""
    key("stranger")(client, setup)
    client.curve_publickey = load_curve_keys(setup.keys).public


WRONG: dict[str, SetKeys] = {
    "no key": lambda client, setup: None,
    "password": plain,
    "unknown key": key("stranger"),
    "key of the server": key("keys/server"),
    "key of another server": key("router", "false_server.key"),
    "public key with another secret": half,
}


def make_dealer(context: "zmq.Context[Any]", setup: Setup, set_keys: SetKeys) -> "zmq.Socket[Any]":
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    set_keys(dealer, setup)
    return dealer


@pytest.mark.parametrize("name", ["router", "other"])
def test_client_with_an_allowed_key_receives_events(context: "zmq.Context[Any]", setup: Setup, name: str) -> None:
    dealer = make_dealer(context, setup, key(name))
    dealer.connect(setup.replay)
    dealer.send(ZERO)
    replay_socket = setup.publisher.replay_socket
    assert replay_socket is not None and replay_socket.poll(WAIT_MS)
    setup.publisher.answer()
    kinds = []
    while not kinds or kinds[-1] != END:
        assert dealer.poll(WAIT_MS)
        kinds.append(dealer.recv_multipart()[0])
    assert kinds == [TOPIC, END]
    dealer.close()


@pytest.mark.parametrize("set_keys", thinned(WRONG.values(), keep=3), ids=WRONG)
@pytest.mark.parametrize("endpoint", ["events", "replay"])
def test_other_clients_are_rejected(
    context: "zmq.Context[Any]", setup: Setup, set_keys: SetKeys, endpoint: str
) -> None:
    dealer = make_dealer(context, setup, set_keys)
    monitor = dealer.get_monitor_socket(FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    dealer.connect(getattr(setup, endpoint))
    with contextlib.suppress(zmq.Again):  # the connection may be closed already
        dealer.send(ZERO, zmq.NOBLOCK)
    assert monitor.poll(WAIT_MS)
    assert recv_monitor_message(monitor)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED
    replay_socket = setup.publisher.replay_socket
    assert replay_socket is not None and not replay_socket.poll(20)
    assert not dealer.poll(0)
    dealer.disable_monitor()
    monitor.close()
    dealer.close()


def test_allowed_client_receives_events_after_rejected_ones(context: "zmq.Context[Any]", setup: Setup) -> None:
    test_client_with_an_allowed_key_receives_events(context, setup, "router")


def test_invalid_handshake_bytes(context: "zmq.Context[Any]", setup: Setup) -> None:
    for sent in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03", os.urandom(500), bytes(5000)):
        host, _, port = setup.replay.removeprefix("tcp://").partition(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(sent)
    test_client_with_an_allowed_key_receives_events(context, setup, "other")


def test_scheduler_loop_uses_the_keys(context: "zmq.Context[Any]", setup: Setup, tmp_path: Path) -> None:
    """The loop reads the keys that the flags name. A client without a key gets nothing."""
    replay = f"tcp://127.0.0.1:{free_port()}"
    endpoints = {"kv_events_endpoint": f"ipc://{tmp_path}/events", "kv_events_replay_endpoint": replay}
    loop = LoopUnderTest(context, tmp_path, make_config(kv_events_curve_dir=str(setup.keys), **endpoints))
    loop.handshake()
    keyless, router = make_dealer(context, setup, WRONG["no key"]), make_dealer(context, setup, key("router"))
    for dealer in (keyless, router):
        dealer.connect(replay)
        dealer.send(ZERO)
    assert router.poll(WAIT_MS) and router.recv_multipart()[0] == TOPIC
    assert not keyless.poll(0)
    keyless.close()
    router.close()
    loop.stop()


# ---- folders of keys


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return make_keys(tmp_path / "keys")


def test_valid_key_folder(keys: Path) -> None:
    found = load_curve_keys(keys)
    assert len(found.public) == len(found.secret) == 40 and found.public != found.secret
    check_endpoints("tcp://127.0.0.1:5557", "tcp://10.0.0.1:5557", str(keys))


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5557", "tcp://10.1.2.3:5557"])
def test_tcp_requires_keys(endpoint: str, tmp_path: Path) -> None:
    for given in ((endpoint, ""), (f"ipc://{tmp_path}/events", endpoint)):
        with pytest.raises(ConfigError, match="TCP needs CURVE keys"):
            check_endpoints(*given)


def test_keys_without_tcp_are_refused(keys: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a tcp:// endpoint"):
        check_endpoints(f"ipc://{tmp_path}/events", "", str(keys))


def _garble(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    file.chmod(0o600)


def _link(place: Path) -> None:
    target = place.with_name(f"{place.name}-elsewhere")
    place.rename(target)
    place.symlink_to(target)


INVALID_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "folder readable by others": (lambda k: k.chmod(0o755), "mode 0700"),
    "folder writable by the group": (lambda k: k.chmod(0o770), "mode 0700"),
    "list writable by others": (lambda k: (k / ALLOWED).chmod(0o777), "mode 0700"),
    "secret readable by others": (lambda k: (k / SECRET).chmod(0o644), "mode 0600"),
    "secret readable by the group": (lambda k: (k / SECRET).chmod(0o640), "mode 0600"),
    "public key writable by others": (lambda k: (k / ALLOWED / "router.key").chmod(0o666), "belongs to this user"),
    "no folder": (shutil.rmtree, "not found"),
    "no secret": (lambda k: (k / SECRET).unlink(), "not found"),
    "no list": (lambda k: shutil.rmtree(k / ALLOWED), "not found"),
    "an empty list": (lambda k: (k / ALLOWED / "router.key").unlink(), "add one per permitted peer"),
    "a list of other files": (lambda k: (k / ALLOWED / "router.key").rename(k / ALLOWED / "x.txt"), "add one per"),
    "a folder that is a link": (_link, "mode 0700"),
    "a secret that is a link": (lambda k: _link(k / SECRET), "mode 0600"),
    "a public key that is a link": (lambda k: _link(k / ALLOWED / "router.key"), "not a link"),
    "a secret that is a folder": (lambda k: ((k / SECRET).unlink(), (k / SECRET).mkdir(0o700)), "mode 0600"),
    "a public key file as the secret": (
        lambda k: _garble(k / SECRET, (k / "server.key").read_bytes()),
        "no secret key",
    ),
    "an empty secret": (lambda k: _garble(k / SECRET, b""), "a ZeroMQ key file"),
    "a secret of garbage": (lambda k: _garble(k / SECRET, os.urandom(300)), "a ZeroMQ key file"),
    "a huge secret": (lambda k: _garble(k / SECRET, b"#" * 10**6), "a ZeroMQ key file"),
    "a short secret": (
        lambda k: _garble(k / SECRET, b'metadata\ncurve\n    public-key = "abc"\n    secret-key = "abc"\n'),
        "a ZeroMQ key file",
    ),
    "a public key of garbage": (lambda k: _garble(k / ALLOWED / "router.key", b"\xff\xfe\x00"), "a ZeroMQ key file"),
    "one bad key among good ones": (lambda k: _garble(k / ALLOWED / "zzz.key", b"x"), "a ZeroMQ key file"),
}


@pytest.mark.parametrize(("spoil", "message"), INVALID_FOLDERS.values(), ids=INVALID_FOLDERS)
def test_invalid_key_folder(keys: Path, spoil: Callable[[Path], object], message: str) -> None:
    secret = load_curve_keys(keys).secret.decode()
    spoil(keys)
    with pytest.raises(ConfigError, match=message) as caught:
        check_endpoints("tcp://127.0.0.1:5557", "", str(keys))
    assert "--kv-events-curve-dir" in str(caught.value) and secret not in str(caught.value)


def test_documented_recipe_makes_valid_keys(tmp_path: Path) -> None:
    """The engine must accept the folder, with the usual umask before it."""
    page = (Path(__file__).parents[2] / "docs" / "kv_events.md").read_text()
    (recipe,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    subprocess.run([sys.executable, "-P", "-c", recipe], cwd=tmp_path, umask=0o022, check=True)
    check_endpoints("tcp://127.0.0.1:5557", "", str(tmp_path / "keys"))
    assert load_curve_keys(tmp_path / "keys").public
    assert (tmp_path / "router-home" / "router.key_secret").stat().st_mode & 0o077 == 0


def test_a_folder_of_another_user(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match="belongs to this user"):
        load_curve_keys(keys)


@pytest.fixture
def own(context: "zmq.Context[Any]", setup: Setup, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    """A publisher of one test, with the keys of ``setup`` and no time limit of handshakes."""
    monkeypatch.setattr(connection_limit, "HANDSHAKE_MS", 600_000)
    before = threading.active_count()
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    publisher = KVEventPublisher(context, events, replay, 7, curve_dir=str(setup.keys))
    yield setup._replace(publisher=publisher, events=events, replay=replay)
    publisher.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("endpoint", ["events", "replay"])
def test_connections_without_a_key_are_limited(
    context: "zmq.Context[Any]", own: Setup, caplog: pytest.LogCaptureFixture, endpoint: str
) -> None:
    """The excess ones are closed, with one line in the log, and afterwards a router can connect."""
    with caplog.at_level(logging.WARNING), strangers(getattr(own, endpoint), MAX_CONNECTIONS + 40) as connections:
        deadline = time.monotonic() + 8
        while open_ones(connections) > MAX_CONNECTIONS:
            assert time.monotonic() < deadline
        assert open_ones(connections) > 0
    assert sum("too many connections" in record.message for record in caplog.records) == 1
    dealer = make_dealer(context, own, key("router"))
    dealer.connect(own.replay)
    dealer.send(ZERO)
    assert own.publisher.replay_socket is not None and own.publisher.replay_socket.poll(WAIT_MS)
    dealer.close()


def test_connection_without_a_handshake_is_closed(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limit, "HANDSHAKE_MS", 50)
    with zmq.Context() as context:
        bound = context.socket(zmq.PUB)
        port = free_port()
        limit = connection_limit.ConnectionLimit(bound, f"tcp://127.0.0.1:{port}")
        bound.bind(f"tcp://127.0.0.1:{port}")
        with strangers(f"tcp://127.0.0.1:{port}", 3) as connections:
            while open_ones(connections):
                pass
        limit.close()
        bound.close()


def test_only_connections_of_the_port_are_closed() -> None:
    """The number of a descriptor may name another file when the event is read."""
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile() as file:
        for descriptor in (ours.fileno(), file.fileno(), 99_999):
            connection_limit.close_connection(descriptor, 5557)
        theirs.send(b"x")
        assert ours.recv(1) == b"x" and file.write(b"x") == 1
