"""The encoding of cache events, and the endpoints at which they may be published."""

import socket
from pathlib import Path

import msgspec
import pytest

from quire.protocol.errors import ConfigError
from quire.protocol.wire.kv_events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KVEventBatch,
    check_endpoints,
)


def test_batch_encoding_matches_the_documentation() -> None:
    """Decoded as plain arrays, because subscribers in other languages read these."""
    events = [AllBlocksCleared(), BlocksStored([b"a", b"b"], 16), BlocksRemoved([b"a"], 1, "host")]
    encoded = msgspec.msgpack.encode(KVEventBatch(1.5, events, 7))
    assert msgspec.msgpack.decode(encoded) == [
        1.5,
        [[52, ""], [50, [b"a", b"b"], 16, 0, "device"], [51, [b"a"], 1, "host"]],
        7,
    ]
    assert msgspec.msgpack.decode(encoded, type=KVEventBatch) == KVEventBatch(1.5, events, 7)


def test_unknown_trailing_fields_are_ignored() -> None:
    encoded = msgspec.msgpack.encode([1.0, [[52, "", "more"], [51, [b"a"], 0, "device", "more"]], 7, "more"])
    assert msgspec.msgpack.decode(encoded, type=KVEventBatch).events == [AllBlocksCleared(), BlocksRemoved([b"a"])]


@pytest.mark.parametrize(
    "endpoint",
    [
        *("tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://255.255.255.255:5557", "tcp://224.0.0.1:5557"),
        *("tcp://10.0.0:5557", "tcp://10.0.0.1.1:5557", "tcp://10.0.0.256:5557", "tcp://eth0:5557"),
        *("tcp://[::]:5557", "tcp://10.0.0.1;10.0.0.2:5557", "tcp://localhost:5557", "tcp://127.0.0.1"),
        *("tcp://127.0.0.1:0", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:*", "tcp://127.0.0.1:1;tcp://*:2"),
        *("tcp://127.0.0.1:5557\n", "ipc://@abstract", "ipc://*", "ipc://relative/name", "ipc://", "inproc://x"),
        *("/tmp/name", "pgm://eth0"),
    ],
)
def test_endpoints_that_other_users_could_read_are_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--kv-events-endpoint must be ipc:///directory/name or tcp://ADDRESS:port"):
        check_endpoints(endpoint, "", "keys")
    with pytest.raises(ConfigError, match="--kv-events-replay-endpoint must be"):
        check_endpoints("tcp://127.0.0.1:5557", endpoint, "keys")


def test_tcp_without_keys_must_be_allowed() -> None:
    check_endpoints("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5657", is_open=True)
    with pytest.raises(ConfigError, match="TCP needs CURVE keys"):
        check_endpoints("tcp://10.0.0.1:5557", "")
    with pytest.raises(ConfigError, match="must be ipc"):
        check_endpoints("tcp://*:5557", "", is_open=True)
    for endpoint, curve_dir in (("tcp://10.0.0.1:5557", "keys"), ("", "")):
        with pytest.raises(ConfigError, match="--kv-events-without-keys needs a tcp:// endpoint and no"):
            check_endpoints(endpoint, "", curve_dir, is_open=True)


def test_private_endpoints_are_accepted(tmp_path: Path) -> None:
    check_endpoints("", "")
    check_endpoints(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")


def test_replay_needs_events_and_a_separate_endpoint() -> None:
    with pytest.raises(ConfigError, match="needs --kv-events-endpoint"):
        check_endpoints("", "tcp://127.0.0.1:5557")
    with pytest.raises(ConfigError, match="must not be"):
        check_endpoints("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557")


def test_directory_must_be_private(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    endpoint = f"ipc://{folder}/events"
    with pytest.raises(ConfigError, match=f"{endpoint}: the directory must have mode 0700"):
        check_endpoints(endpoint, "")
    folder.chmod(0o700)
    check_endpoints(endpoint, "")
    for missing in (f"ipc://{tmp_path}/none/events", f"ipc://{tmp_path}/nul\0/events"):
        with pytest.raises(ConfigError, match="directory not found"):
            check_endpoints(missing, "")


def test_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most 107 bytes"):
        check_endpoints(f"ipc://{tmp_path}/{'x' * 107}", "")


def test_existing_path_that_is_not_a_socket_is_refused(tmp_path: Path) -> None:
    precious, link, old = tmp_path / "precious", tmp_path / "link", tmp_path / "old"
    precious.write_text("keep")
    link.symlink_to(tmp_path / "nowhere")
    for path in (precious, link, tmp_path / ".."):
        with pytest.raises(ConfigError, match="exists and is not a socket"):
            check_endpoints(f"ipc://{path}", "")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(old))
    check_endpoints(f"ipc://{old}", "")
