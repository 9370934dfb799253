"""What a router hears of the prefix cache: which contents can be found, and where one listens.

A content is named by its hash, which covers everything before it, so that no event has to name a parent. What is on
the wire around these structs is told in docs/kv_events.md.
"""

import os
import re
from ipaddress import IPv4Address
from pathlib import Path
from typing import TypeAlias

import msgspec

from quire.protocol.errors import ConfigError, EngineError
from quire.protocol.wire.curve_keys import FLAG, load_curve_keys

TOPIC = b"kv"
"""First frame of every published batch, and of a kept one in an answer."""

GONE = b"gone"
"""Answer: what was asked for is not kept any more; the sequence number is the oldest kept one."""

MORE = b"more"
"""Answer, last message: ask again from this sequence number."""

END = b"end"
"""Answer, last message: there is no more; the sequence number is the next one to be published."""

HASH_BYTES = {"sha256": 32, "xxh3_128": 16}
"""Length of a hash, by ``EngineConfig.prefix_caching_hash_algo``."""


MAX_SOCKET_PATH = 107
"""Linux' limit."""


class _Event(msgspec.Struct, array_like=True, frozen=True):
    """Like ``messages.Message``, which would bring NumPy into the command line, with tags of the same numbering."""


class BlocksStored(_Event, frozen=True, tag=50):
    """These contents can be found from now on. ``block_size``: tokens in each."""

    hashes: list[bytes]
    block_size: int
    group: int = 0


class BlocksRemoved(_Event, frozen=True, tag=51):
    """These contents cannot be found any more, in any block."""

    hashes: list[bytes]
    group: int = 0


class AllBlocksCleared(_Event, frozen=True, tag=52):
    """Nothing can be found: the cache was reset, or the engine begins."""


KVEvent: TypeAlias = BlocksStored | BlocksRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, frozen=True):
    """What one step changed, in order.

    Attributes:
        now: the engine's monotonic seconds; comparable within one ``incarnation`` only.
        life: drawn when the publisher starts. Another one than before: forget all, and ask from 0.
    """

    now: float
    events: list[KVEvent]
    incarnation: int = 0


def check_endpoints(endpoint: str, replay_endpoint: str, curve_dir: str = "") -> None:
    """Refuse endpoints that others could read than this user's processes, or holders of the keys in ``curve_dir``.

    Raises:
        ConfigError: neither ``ipc://`` in a folder of our own nor ``tcp://`` at one address of this machine and with
            keys; twice the same; a replay of events that are not published; or keys that are none, or for nothing.
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
                f"{flag} must be ipc:///folder/name or tcp://ADDRESS:port with a numeric address, not {given}"
            )
        elif given and not curve_dir:
            raise ConfigError(f"{flag} {given}: TCP needs keys, which {FLAG} names: without, anybody could read it")
    if curve_dir:
        if not is_tcp(endpoint) and not is_tcp(replay_endpoint):
            raise ConfigError(f"{FLAG} is for tcp:// endpoints, and there is none")
        load_curve_keys(Path(curve_dir))


def is_tcp(endpoint: str) -> bool:
    return endpoint.startswith("tcp://")


def _is_one_address(endpoint: str) -> bool:
    """Of IPv4, in numbers: a name may mean another machine tomorrow, and a wildcard means every network."""
    match = re.fullmatch(r"tcp://([0-9.]{7,15}):([0-9]{1,5})", endpoint)
    if match is None or not 1 <= int(match[2]) <= 65535:
        return False
    try:
        address = IPv4Address(match[1])
    except ValueError:
        return False
    return not (address.is_unspecified or address.is_multicast or address.is_reserved)


def _check_path(flag: str, endpoint: str) -> None:
    """Binding deletes what has the socket's name: only another socket may have it."""
    from quire.protocol.wire.zmq_channel import (
        check_socket_directory,  # not at the top: the command line does without zmq
    )

    path = Path(endpoint.removeprefix("ipc://"))
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(f"{flag} {endpoint}: a socket's path has at most {MAX_SOCKET_PATH} bytes")
    try:
        check_socket_directory(path.parent)
        taken = path.is_symlink() or (path.exists() and not path.is_socket())
    except (OSError, ValueError):
        raise ConfigError(f"{flag} {endpoint}: there is no such folder") from None
    except EngineError:
        raise ConfigError(f"{flag} {endpoint}: the folder must have mode 0700 and belong to this user") from None
    if taken or not path.name:
        raise ConfigError(f"{flag} {endpoint}: there is something else of this name")
