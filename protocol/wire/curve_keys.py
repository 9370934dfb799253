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
    import zmq

SECRET = "server.key_secret"
ALLOWED = "allowed"
KV_EVENTS_FLAG = "--kv-events-curve-dir"
DOMAIN = "quire"
MAX_KEY_FILE_BYTES = 16_384
KEY_CHARACTERS = 40


class CurveKeys(NamedTuple):
    """The server's key pair, 40 characters of Z85 each, and the directory of accepted public keys."""

    public: bytes
    secret: bytes
    allowed: Path


def load_curve_keys(folder: Path, flag: str = KV_EVENTS_FLAG) -> CurveKeys:
    """Read and check the key directory. ``flag``: for errors, the flag that names it.

    Raises:
        ConfigError: a directory or file is missing, other users could change or read it, or it contains no key.
    """
    for place in (folder, folder / ALLOWED):
        require_private(flag, place, stat.S_ISDIR, "a directory of mode 0700 that belongs to this user", 0o077)
    require_private(flag, folder / SECRET, stat.S_ISREG, "a file of mode 0600 that belongs to this user", 0o077)
    names = [name for name in sorted((folder / ALLOWED).iterdir()) if name.suffix == ".key"]
    if not names:
        raise ConfigError(f"{flag}: {folder / ALLOWED} has no public key (NAME.key): add one per permitted peer")
    for name in names:
        require_private(
            flag, name, stat.S_ISREG, "a file, not a link, that belongs to this user and no other may write", 0o022
        )
        read_key(name, flag)
    public, secret = read_key(folder / SECRET, flag)
    if secret is None:
        raise ConfigError(f"{flag}: {folder / SECRET} has no secret key")
    return CurveKeys(public, secret, folder / ALLOWED)


def require_private(flag: str, place: Path, is_kind: Any, wanted: str, forbidden: int) -> None:
    """Raise ConfigError unless a file or folder is of this kind and user, and has none of the forbidden mode bits."""
    try:
        info = place.lstat()
    except (OSError, ValueError):
        raise ConfigError(f"{flag}: {place} not found") from None
    if not is_kind(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & forbidden:
        raise ConfigError(f"{flag}: {place} must be {wanted}")


def read_key(file: Path, flag: str) -> tuple[bytes, bytes | None]:
    """Return the public key in a file, and the secret key or None. Raises ConfigError if it is no key file."""
    from zmq.auth import load_certificate

    try:
        if file.stat().st_size > MAX_KEY_FILE_BYTES:
            raise ValueError
        public, secret = load_certificate(file)
    except (OSError, ValueError):
        raise ConfigError(f"{flag}: {file} is not a ZeroMQ key file") from None
    if any(key is not None and len(key) != KEY_CHARACTERS for key in (public, secret)):
        raise ConfigError(f"{flag}: {file} is not a ZeroMQ key file")
    return public, secret


class CurveEnd(NamedTuple):
    """The keys of one socket, as 40 characters of Z85 each.

    Attributes:
        public, secret: its own pair.
        peer: the public key of the only peer. For a socket that connects it is the server's.
    """

    public: str
    secret: str
    peer: str

    def connect_with(self, socket: "zmq.Socket[Any]") -> None:
        """Set the keys of a socket that is to connect."""
        socket.curve_publickey = self.public.encode()
        socket.curve_secretkey = self.secret.encode()
        socket.curve_serverkey = self.peer.encode()


class PeerContext:
    """A ZeroMQ context; each of its bound sockets accepts one key only. Owns the authentication thread."""

    def __init__(self) -> None:
        import zmq
        from zmq.auth.thread import ThreadAuthenticator

        self.context: zmq.Context[Any] = zmq.Context()
        self._authenticator: ThreadAuthenticator = ThreadAuthenticator(self.context)
        self._authenticator.start()
        self._peers: dict[str, bytes] = {}

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a key may connect to the socket named ``domain``. The authentication thread calls this."""
        return self._peers.get(domain) == key

    def bind_with(self, socket: "zmq.Socket[Any]", name: str, keys: CurveEnd) -> None:
        """Set the keys of a socket that is to be bound. It replaces the earlier socket of this name, whose peer cannot
        connect any more.
        """
        self._peers[name] = keys.peer.encode()
        self._authenticator.configure_curve_callback(name, self)
        socket.zap_domain = name.encode()
        socket.curve_publickey = keys.public.encode()
        socket.curve_secretkey = keys.secret.encode()
        socket.curve_server = True

    def close(self) -> None:
        """Stop authentication and terminate the context; its sockets must be closed first."""
        self._authenticator.stop()
        self.context.term()


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
