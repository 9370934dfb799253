"""Events over TCP: who has one of the keys that are let in hears them, and nobody else hears anything."""

import contextlib
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zmq
from curve_files import make_keys, with_api_keys
from kv_event_ends import WAIT_MS, keys_of, layout_of
from loop_under_test import LoopUnderTest
from scheduler_driver import make_config
from tiers import thinned
from zmq.auth import create_certificates
from zmq.utils.monitor import recv_monitor_message

from quire.protocol.errors import ConfigError
from quire.protocol.wire.curve_keys import ALLOWED, SECRET, load_curve_keys
from quire.protocol.wire.kv_events import END, TOPIC, check_endpoints
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.kv.events import KVEventRecorder
from quire.scheduler_proc.process.kv_event_publisher import KVEventPublisher

FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
ZERO = (0).to_bytes(8, "big")


class Place(NamedTuple):
    """A publisher over TCP with two clients' keys let in, and where everything lies."""

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
def place(context: "zmq.Context[Any]", tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("curve")
    keys = make_keys(folder / "keys", "router", "other")
    create_certificates(folder, "stranger")
    create_certificates(folder, "false_server")
    events, replay = f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
    publisher = KVEventPublisher(context, events, replay, 7, curve_dir=str(keys))
    recorder = KVEventRecorder(layout_of(4), 32)
    pool = BlockPool(40, enable_caching=True, events=recorder)
    publisher.follow(recorder)
    assert not keys_of(pool)
    publisher.publish(0.0)
    yield Place(publisher, events, replay, keys, folder)
    publisher.close()


Dress = Callable[["zmq.Socket[Any]", Place], None]


def key(name: str, server: str = "keys/server.key") -> Dress:
    return lambda client, place: with_api_keys(client, place.folder / f"{name}.key_secret", place.folder / server)


def plain(client: "zmq.Socket[Any]", place: Place) -> None:
    client.plain_username, client.plain_password = b"router", b"router"


def half(client: "zmq.Socket[Any]", place: Place) -> None:
    """The public key of one who is let in, with another's secret."""
    key("stranger")(client, place)
    client.curve_publickey = load_curve_keys(place.keys).public


WRONG: dict[str, Dress] = {
    "no key": lambda client, place: None,
    "a password": plain,
    "a stranger's key": key("stranger"),
    "the server's own key": key("keys/server"),
    "a key of another server": key("router", "false_server.key"),
    "a public key that is not theirs": half,
}


def ask(context: "zmq.Context[Any]", place: Place, dress: Dress) -> "zmq.Socket[Any]":
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dress(dealer, place)
    return dealer


@pytest.mark.parametrize("name", ["router", "other"])
def test_a_key_that_is_let_in_hears_everything(context: "zmq.Context[Any]", place: Place, name: str) -> None:
    dealer = ask(context, place, key(name))
    dealer.connect(place.replay)
    dealer.send(ZERO)
    replay_socket = place.publisher.replay_socket
    assert replay_socket is not None and replay_socket.poll(WAIT_MS)
    place.publisher.answer()
    kinds = []
    while not kinds or kinds[-1] != END:
        assert dealer.poll(WAIT_MS)
        kinds.append(dealer.recv_multipart()[0])
    assert kinds == [TOPIC, END]
    dealer.close()


@pytest.mark.parametrize("dress", thinned(WRONG.values(), keep=3), ids=WRONG)
@pytest.mark.parametrize("endpoint", ["events", "replay"])
def test_nobody_else_gets_so_far_as_to_ask(
    context: "zmq.Context[Any]", place: Place, dress: Dress, endpoint: str
) -> None:
    dealer = ask(context, place, dress)
    monitor = dealer.get_monitor_socket(FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    dealer.connect(getattr(place, endpoint))
    with contextlib.suppress(zmq.Again):  # it may have been turned away already
        dealer.send(ZERO, zmq.NOBLOCK)
    assert monitor.poll(WAIT_MS)
    assert recv_monitor_message(monitor)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED
    replay_socket = place.publisher.replay_socket
    assert replay_socket is not None and not replay_socket.poll(20)
    assert not dealer.poll(0)
    dealer.disable_monitor()
    monitor.close()
    dealer.close()


def test_one_who_is_let_in_still_hears_after_all_the_others(context: "zmq.Context[Any]", place: Place) -> None:
    test_a_key_that_is_let_in_hears_everything(context, place, "router")


def test_bytes_that_are_no_handshake(context: "zmq.Context[Any]", place: Place) -> None:
    for sent in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03", os.urandom(500), bytes(5000)):
        host, _, port = place.replay.removeprefix("tcp://").partition(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(sent)
    test_a_key_that_is_let_in_hears_everything(context, place, "other")


def test_the_schedulers_loop_has_the_keys(context: "zmq.Context[Any]", place: Place, tmp_path: Path) -> None:
    """As the flags tell it; a client without a key is there all the time."""
    replay = f"tcp://127.0.0.1:{free_port()}"
    told = {"kv_events_endpoint": f"ipc://{tmp_path}/events", "kv_events_replay_endpoint": replay}
    loop = LoopUnderTest(context, tmp_path, make_config(kv_events_curve_dir=str(place.keys), **told))
    loop.handshake()
    nobody, router = ask(context, place, WRONG["no key"]), ask(context, place, key("router"))
    for dealer in (nobody, router):
        dealer.connect(replay)
        dealer.send(ZERO)
    assert router.poll(WAIT_MS) and router.recv_multipart()[0] == TOPIC
    assert not nobody.poll(0)
    nobody.close()
    router.close()
    loop.stop()


# ---- folders of keys


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return make_keys(tmp_path / "keys")


def test_a_right_folder(keys: Path) -> None:
    found = load_curve_keys(keys)
    assert len(found.public) == len(found.secret) == 40 and found.public != found.secret
    check_endpoints("tcp://127.0.0.1:5557", "tcp://10.0.0.1:5557", str(keys))


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5557", "tcp://10.1.2.3:5557"])
def test_tcp_without_keys(endpoint: str, tmp_path: Path) -> None:
    for given in ((endpoint, ""), (f"ipc://{tmp_path}/events", endpoint)):
        with pytest.raises(ConfigError, match="TCP needs CURVE keys"):
            check_endpoints(*given)


def test_keys_for_nothing(keys: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a tcp:// endpoint"):
        check_endpoints(f"ipc://{tmp_path}/events", "", str(keys))


def _garble(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    file.chmod(0o600)


def _link(place: Path) -> None:
    target = place.with_name(f"{place.name}-elsewhere")
    place.rename(target)
    place.symlink_to(target)


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "a folder that others can read": (lambda k: k.chmod(0o755), "mode 0700"),
    "a folder that its group can write": (lambda k: k.chmod(0o770), "mode 0700"),
    "a list that others can write": (lambda k: (k / ALLOWED).chmod(0o777), "mode 0700"),
    "a secret that others can read": (lambda k: (k / SECRET).chmod(0o644), "mode 0600"),
    "a secret of the group": (lambda k: (k / SECRET).chmod(0o640), "mode 0600"),
    "a public key that others can write": (lambda k: (k / ALLOWED / "router.key").chmod(0o666), "belongs to this user"),
    "no folder": (shutil.rmtree, "not found"),
    "no secret": (lambda k: (k / SECRET).unlink(), "not found"),
    "no list": (lambda k: shutil.rmtree(k / ALLOWED), "not found"),
    "an empty list": (lambda k: (k / ALLOWED / "router.key").unlink(), "add one per permitted subscriber"),
    "a list of other files": (lambda k: (k / ALLOWED / "router.key").rename(k / ALLOWED / "x.txt"), "add one per"),
    "a folder that is a link": (_link, "mode 0700"),
    "a secret that is a link": (lambda k: _link(k / SECRET), "mode 0600"),
    "a public key that is a link": (lambda k: _link(k / ALLOWED / "router.key"), "not a link"),
    "a secret that is a folder": (lambda k: ((k / SECRET).unlink(), (k / SECRET).mkdir(0o700)), "mode 0600"),
    "a public file for a secret": (lambda k: _garble(k / SECRET, (k / "server.key").read_bytes()), "no secret key"),
    "an empty secret": (lambda k: _garble(k / SECRET, b""), "a ZeroMQ key file"),
    "a secret of garbage": (lambda k: _garble(k / SECRET, os.urandom(300)), "a ZeroMQ key file"),
    "a secret without end": (lambda k: _garble(k / SECRET, b"#" * 10**6), "a ZeroMQ key file"),
    "a short secret": (
        lambda k: _garble(k / SECRET, b'metadata\ncurve\n    public-key = "abc"\n    secret-key = "abc"\n'),
        "a ZeroMQ key file",
    ),
    "a public key of garbage": (lambda k: _garble(k / ALLOWED / "router.key", b"\xff\xfe\x00"), "a ZeroMQ key file"),
    "one bad key among good ones": (lambda k: _garble(k / ALLOWED / "zzz.key", b"x"), "a ZeroMQ key file"),
}


@pytest.mark.parametrize(("spoil", "told"), SPOILT.values(), ids=SPOILT)
def test_a_folder_that_will_not_do(keys: Path, spoil: Callable[[Path], object], told: str) -> None:
    secret = load_curve_keys(keys).secret.decode()
    spoil(keys)
    with pytest.raises(ConfigError, match=told) as caught:
        check_endpoints("tcp://127.0.0.1:5557", "", str(keys))
    assert "--kv-events-curve-dir" in str(caught.value) and secret not in str(caught.value)


def test_a_folder_of_another_user(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match="belongs to this user"):
        load_curve_keys(keys)
