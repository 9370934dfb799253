"""CURVE key folders, made as docs/kv_events.md describes."""

import shutil
from pathlib import Path
from typing import Any

import zmq
from zmq.auth import create_certificates, load_certificate

from quire.protocol.wire.curve_keys import ALLOWED, SECRET


def make_keys(folder: Path, *clients: str) -> Path:
    """Make a server's keys and those of ``clients`` (one client by default), whose own keys are in
    ``folder.parent``."""
    (folder / ALLOWED).mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    create_certificates(folder, "server")
    (folder / SECRET).chmod(0o600)
    for name in clients or ("router",):
        public, _ = create_certificates(folder.parent, name)
        shutil.copy(public, folder / ALLOWED)
    return folder


def set_curve_keys(socket: "zmq.Socket[Any]", own: Path, server: Path) -> None:
    """Give a client socket its own secret key file and the server's public key."""
    socket.curve_publickey, secret = load_certificate(own)
    assert secret is not None
    socket.curve_secretkey = secret
    socket.curve_serverkey = load_certificate(server)[0]
