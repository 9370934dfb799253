"""CURVE keys for sockets that other machines can reach: the server's own pair, and the accepted public keys.

The key directory has mode 0700 and belongs to this user. It contains ``server.key_secret`` and a directory ``allowed``
with the public keys (``NAME.key``) of permitted clients; ``zmq.auth.create_certificates`` writes such files.
Connections with other keys are rejected.
"""

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.protocol.errors import ConfigError

if TYPE_CHECKING:  # the command line must not import zmq
    pass

SECRET = "server.key_secret"
ALLOWED = "allowed"
FLAG = "--kv-events-curve-dir"
DOMAIN = "kv-events"
MAX_KEY_FILE_BYTES = 16_384
KEY_CHARACTERS = 40


class CurveKeys(NamedTuple):
    """The server's key pair, 40 characters of Z85 each, and the directory of accepted public keys."""

    public: bytes
    secret: bytes
    allowed: Path


def load_curve_keys(folder: Path) -> CurveKeys:
    """Read and check the key directory.

    Raises:
        ConfigError: a directory or file is missing, other users could change or read it, or it contains no key.
    """
    for place in (folder, folder / ALLOWED):
        _require(place, stat.S_ISDIR, "a directory of mode 0700 that belongs to this user", 0o077)
    _require(folder / SECRET, stat.S_ISREG, "a file of mode 0600 that belongs to this user", 0o077)
    names = [name for name in sorted((folder / ALLOWED).iterdir()) if name.suffix == ".key"]
    if not names:
        raise ConfigError(f"{FLAG}: {folder / ALLOWED} has no public key (NAME.key): add one per permitted subscriber")
    for name in names:
        _require(name, stat.S_ISREG, "a file, not a link, that belongs to this user and no other may write", 0o022)
        _read_key(name)
    public, secret = _read_key(folder / SECRET)
    if secret is None:
        raise ConfigError(f"{FLAG}: {folder / SECRET} has no secret key")
    return CurveKeys(public, secret, folder / ALLOWED)


def _require(place: Path, is_kind: Any, wanted: str, forbidden: int) -> None:
    try:
        info = place.lstat()
    except (OSError, ValueError):
        raise ConfigError(f"{FLAG}: {place} not found") from None
    if not is_kind(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & forbidden:
        raise ConfigError(f"{FLAG}: {place} must be {wanted}")


def _read_key(file: Path) -> tuple[bytes, bytes | None]:
    """Return the public key in a file, and the secret key or None."""
    from zmq.auth import load_certificate

    try:
        if file.stat().st_size > MAX_KEY_FILE_BYTES:
            raise ValueError
        public, secret = load_certificate(file)
    except (OSError, ValueError):
        raise ConfigError(f"{FLAG}: {file} is not a ZeroMQ key file") from None
    if any(key is not None and len(key) != KEY_CHARACTERS for key in (public, secret)):
        raise ConfigError(f"{FLAG}: {file} is not a ZeroMQ key file")
    return public, secret


class CurveContext:
    """A ZeroMQ context; its sockets accept connections with allowed keys only.

    Authentication applies to a whole context, so these sockets do not share one with others. Owns the authentication
    thread.
    """

    def __init__(self, keys: CurveKeys) -> None:
        import zmq
        from zmq.auth.thread import ThreadAuthenticator

        self.context: zmq.Context[Any] = zmq.Context()
        # Start before any socket exists: without authentication every key would be accepted.
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
        """Stop authentication and terminate the context; its sockets must be closed first."""
        self._authenticator.stop()
        self.context.term()
