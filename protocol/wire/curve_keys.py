"""Keys for sockets that other machines can reach: our own, and those that are accepted.

A folder of mode 0700 that belongs to this user, with ``server.key_secret`` and a folder ``allowed`` of the public keys
(``NAME.key``) of those who may connect; ``zmq.auth.create_certificates`` makes such files. No other key opens the
connection, and with an empty list none does.
"""

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.protocol.errors import ConfigError

if TYPE_CHECKING:  # the command line does without zmq
    pass

SECRET = "server.key_secret"
ALLOWED = "allowed"
FLAG = "--kv-events-curve-dir"
DOMAIN = "kv-events"
MAX_KEY_FILE_BYTES = 16_384
KEY_CHARACTERS = 40


class CurveKeys(NamedTuple):
    """Our pair, 40 characters of Z85 each, and the folder of those that are accepted."""

    public: bytes
    secret: bytes
    allowed: Path


def load_curve_keys(folder: Path) -> CurveKeys:
    """Raises ConfigError: a folder or a file that others could change or read, is missing, or holds no key."""
    for place in (folder, folder / ALLOWED):
        _require(place, stat.S_ISDIR, "a folder of mode 0700 that belongs to this user", 0o077)
    _require(folder / SECRET, stat.S_ISREG, "a file of mode 0600 that belongs to this user", 0o077)
    names = [name for name in sorted((folder / ALLOWED).iterdir()) if name.suffix == ".key"]
    if not names:
        raise ConfigError(f"{FLAG}: {folder / ALLOWED} holds no public key (NAME.key): nobody could connect")
    for name in names:
        _require(name, stat.S_ISREG, "a file that belongs to this user, and no link", 0o022)
        _read_key(name)
    public, secret = _read_key(folder / SECRET)
    if secret is None:
        raise ConfigError(f"{FLAG}: {folder / SECRET} holds no secret key")
    return CurveKeys(public, secret, folder / ALLOWED)


def _require(place: Path, is_kind: Any, wanted: str, forbidden: int) -> None:
    try:
        info = place.lstat()
    except (OSError, ValueError):
        raise ConfigError(f"{FLAG}: there is no {place}") from None
    if not is_kind(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & forbidden:
        raise ConfigError(f"{FLAG}: {place} must be {wanted}")


def _read_key(file: Path) -> tuple[bytes, bytes | None]:
    """The public key in a file, and the secret one."""
    from zmq.auth import load_certificate

    try:
        if file.stat().st_size > MAX_KEY_FILE_BYTES:
            raise ValueError
        public, secret = load_certificate(file)
    except (OSError, ValueError):
        raise ConfigError(f"{FLAG}: {file} is no key file of ZeroMQ's") from None
    if any(key is not None and len(key) != KEY_CHARACTERS for key in (public, secret)):
        raise ConfigError(f"{FLAG}: {file} is no key file of ZeroMQ's")
    return public, secret


class CurveContext:
    """A context whose sockets, once made, take connections of allowed keys only.

    A context of its own, because authentication is for a whole context. Owns the thread that authenticates.
    """

    def __init__(self, keys: CurveKeys) -> None:
        import zmq
        from zmq.auth.thread import ThreadAuthenticator

        self.context: zmq.Context[Any] = zmq.Context()
        # Before any socket: without authentication every key would be accepted.
        self._authenticator: ThreadAuthenticator = ThreadAuthenticator(self.context)
        self._authenticator.start()
        self._authenticator.configure_curve(domain=DOMAIN, location=keys.allowed)
        for option, value in (
            (zmq.ZAP_DOMAIN, DOMAIN.encode()),
            (zmq.CURVE_SERVER, 1),
            (zmq.CURVE_PUBLICKEY, keys.public),
            (zmq.CURVE_SECRETKEY, keys.secret),
        ):
            self.context.setsockopt(option, value)

    def close(self) -> None:
        """Its sockets must be closed by then."""
        self._authenticator.stop()
        self.context.term()
