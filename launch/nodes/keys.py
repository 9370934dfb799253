"""The CURVE keys of nodes and of the head machine, as files.

A node has the folder of ``protocol/wire/curve_keys.py``. The head has a folder of mode 0700 with ``head.key_secret``,
its own pair, and ``node.key``, the public key of all nodes.
"""

import os
import stat
from pathlib import Path
from typing import NamedTuple

from quire.protocol.errors import ConfigError
from quire.protocol.wire.curve_keys import ALLOWED, SECRET, read_key, require_private

HEAD_SECRET = "head.key_secret"
NODE_PUBLIC = "node.key"
FLAG = "--node-keys"


class HeadKeys(NamedTuple):
    """The head's own pair, as 40 characters of Z85 each."""

    public: str
    secret: str


def load_head_keys(file: Path) -> HeadKeys:
    """Read the head's pair. Raises ConfigError if the file has none, or others can read it."""
    require_private(FLAG, file, stat.S_ISREG, "a file of mode 0600 that belongs to this user", 0o077)
    public, secret = read_key(file, FLAG)
    if secret is None:
        raise ConfigError(f"{FLAG}: {file} has no secret key")
    return HeadKeys(public.decode(), secret.decode())


def load_node_key(folder: Path) -> str:
    """Check the head's folder; return the public key of the nodes. Raises ConfigError if a file cannot be used."""
    require_private(FLAG, folder, stat.S_ISDIR, "a directory of mode 0700 that belongs to this user", 0o077)
    load_head_keys(folder / HEAD_SECRET)
    file = folder / NODE_PUBLIC
    require_private(FLAG, file, stat.S_ISREG, "a file, not a link, that belongs to this user", 0o022)
    return read_key(file, FLAG)[0].decode()


def make_keys(folder: Path) -> tuple[Path, Path]:
    """Make new pairs for nodes and head. Return the folders for ``quire node --keys`` and ``--node-keys``.

    Raises:
        ConfigError: the folder exists already, or cannot be made.
    """
    node, head = folder / "node", folder / "head"
    try:
        folder.mkdir(mode=0o700, parents=True)
        for place in (node, node / ALLOWED, head):
            place.mkdir(mode=0o700)
        write_pair(node / SECRET, node / "server.key")
        write_pair(head / HEAD_SECRET, head / "head.key")
    except OSError as error:
        raise ConfigError(f"--make-keys: {folder} cannot be made: {error.strerror}: name a new folder") from None
    (node / "server.key").rename(head / NODE_PUBLIC)
    (head / "head.key").rename(node / ALLOWED / "head.key")
    return node, head


def write_pair(secret: Path, public: Path) -> None:
    """Make a pair, and write it to two new files ``NAME.key_secret`` and ``NAME.key`` in one folder."""
    from zmq.auth import create_certificates

    mask = os.umask(0o077)
    try:
        create_certificates(secret.parent, secret.stem)
    finally:
        os.umask(mask)
    assert secret.exists() and public.exists()
