"""Prefix cache events for routers: which contents are cached, and the endpoints to subscribe to.

A content is named by its hash, which covers all tokens before it, so an event needs no parent. docs/kv_events.md
documents the frames around these structs.
"""

import os
import re
from ipaddress import IPv4Address
from pathlib import Path
from typing import TypeAlias

import msgspec

from quire.protocol.errors import ConfigError, EngineError
from quire.protocol.wire.curve_keys import KV_EVENTS_FLAG, load_curve_keys

TOPIC = b"kv"
"""First frame of every published batch, and of a stored batch in a replay answer."""

GONE = b"gone"
"""Replay answer: the requested batch is no longer stored; the sequence number is the oldest stored one."""

MORE = b"more"
"""Last message of a replay answer: continue from this sequence number with another request."""

END = b"end"
"""Last message of a replay answer: it is complete; the sequence number is the next one to be published."""

HASH_BYTES = {"sha256": 32, "xxh3_128": 16}
"""Length of a hash by ``EngineConfig.prefix_caching_hash_algo``."""

MAX_TOPIC_BYTES = 512
MAX_SOCKET_PATH = 107
"""Linux limit on the length of a socket path."""


class _Event(msgspec.Struct, array_like=True, frozen=True):
    """Same encoding as ``link_messages.Message``, without importing NumPy into the command line; tags share one
    numbering.
    """


class BlocksStored(_Event, frozen=True, tag=50):
    """These contents can now be found.

    Attributes:
        block_size: tokens in each block.
        medium: where they are: ``device``, ``host`` or ``disk``.
    """

    hashes: list[bytes]
    block_size: int
    group: int = 0
    medium: str = "device"


class BlocksRemoved(_Event, frozen=True, tag=51):
    """These contents can no longer be found in any block of the medium."""

    hashes: list[bytes]
    group: int = 0
    medium: str = "device"


class AllBlocksCleared(_Event, frozen=True, tag=52):
    """The medium has no content: it was reset, or has lost them. Without a medium: none has content, as at start."""

    medium: str = ""


KVEvent: TypeAlias = BlocksStored | BlocksRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, frozen=True):
    """Changes of one step, in order.

    Attributes:
        now: the engine's monotonic seconds; comparable within one ``incarnation`` only.
        incarnation: random number drawn when the publisher starts. When it changes, discard all state and request a
            replay from 0.
    """

    now: float
    events: list[KVEvent]
    incarnation: int = 0


def check_endpoints(endpoint: str, replay_endpoint: str, curve_dir: str = "", *, is_open: bool = False) -> None:
    """Reject endpoints that other users' processes could read, except holders of the keys in ``curve_dir``.

    Args:
        is_open: whether the user allows ``tcp://`` endpoints that any process can read.

    Raises:
        ConfigError: an endpoint is neither ``ipc://`` in a private directory nor ``tcp://`` at one address of this
            machine with keys; both endpoints are equal; a replay endpoint without events; or keys that are invalid or
            unused.
    """
    if replay_endpoint and not endpoint:
        raise ConfigError("--kv-events-replay-endpoint needs --kv-events-endpoint")
    if endpoint and endpoint == replay_endpoint:
        raise ConfigError(f"--kv-events-replay-endpoint must not be --kv-events-endpoint ({endpoint})")
    for flag, given in (("--kv-events-endpoint", endpoint), ("--kv-events-replay-endpoint", replay_endpoint)):
        if given.startswith("ipc:///"):
            _check_path(flag, given)
        elif given and not _is_one_address(given):
            raise ConfigError(
                f"{flag} must be ipc:///directory/name or tcp://ADDRESS:port with a numeric address (got {given})"
            )
        elif given and not curve_dir and not is_open:
            raise ConfigError(
                f"{flag} {given}: TCP needs CURVE keys, or any process could read it: set {KV_EVENTS_FLAG}, or in a "
                "network that is closed to others --kv-events-without-keys"
            )
    if is_open and (curve_dir or not is_tcp(endpoint)):
        raise ConfigError("--kv-events-without-keys needs a tcp:// endpoint and no --kv-events-curve-dir")
    if curve_dir:
        if not is_tcp(endpoint) and not is_tcp(replay_endpoint):
            raise ConfigError(
                f"{KV_EVENTS_FLAG} needs a tcp:// endpoint: remove it, or set --kv-events-endpoint tcp://..."
            )
        load_curve_keys(Path(curve_dir))


def check_format(kv_events_format: str, topic: str, endpoint: str) -> None:
    """Check the settings of the endpoint of the user. Raises ConfigError if they have no effect, or are too long."""
    if kv_events_format != "quire" and not endpoint:
        raise ConfigError(f"--kv-events-format {kv_events_format} needs --kv-events-endpoint")
    if topic and kv_events_format != "vllm":
        raise ConfigError(f"--kv-events-topic {topic[:64]!r} needs --kv-events-format vllm: quire's topic is kv")
    if len(topic.encode(errors="surrogatepass")) > MAX_TOPIC_BYTES:
        raise ConfigError(f"--kv-events-topic must have at most {MAX_TOPIC_BYTES} bytes (got {len(topic)} characters)")


def is_tcp(endpoint: str) -> bool:
    return endpoint.startswith("tcp://")


def _is_one_address(endpoint: str) -> bool:
    """Whether this is one numeric IPv4 address and port: a name could resolve to another machine later, and a wildcard
    means every network.
    """
    match = re.fullmatch(r"tcp://([0-9.]{7,15}):([0-9]{1,5})", endpoint)
    if match is None or not 1 <= int(match[2]) <= 65535:
        return False
    try:
        address = IPv4Address(match[1])
    except ValueError:
        return False
    return not (address.is_unspecified or address.is_multicast or address.is_reserved)


def _check_path(flag: str, endpoint: str) -> None:
    """Reject an existing path that is not a socket, because binding deletes it."""
    from quire.protocol.wire.zmq_channel import (
        check_socket_directory,  # imported here because the command line must not import zmq
    )

    path = Path(endpoint.removeprefix("ipc://"))
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(f"{flag} {endpoint}: a socket path must have at most {MAX_SOCKET_PATH} bytes")
    try:
        check_socket_directory(path.parent)
        taken = path.is_symlink() or (path.exists() and not path.is_socket())
    except (OSError, ValueError):
        raise ConfigError(f"{flag} {endpoint}: directory not found") from None
    except EngineError:
        raise ConfigError(f"{flag} {endpoint}: the directory must have mode 0700 and belong to this user") from None
    if taken or not path.name:
        raise ConfigError(f"{flag} {endpoint}: the path exists and is not a socket")
