"""The server's listening socket, bound before any process is started, so that an address in use is reported at once."""

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path

from quire.frontend.serve_options import ServeOptions
from quire.protocol.errors import ConfigError

BACKLOG = 1024


class Listener:
    """A listening TCP or unix socket. Front ends inherit it.

    Attributes:
        address: the address for people: a URL, or ``unix:PATH``.
    """

    def __init__(self, options: ServeOptions) -> None:
        """Raise ConfigError if the address is in use or cannot be used."""
        scheme = "https" if options.ssl_certfile else "http"
        self._file: os.stat_result | None = None
        if options.uds is not None:
            self._path = Path(options.uds).absolute()
            self.socket = _bind_unix(self._path)
            self._file = self._path.stat()
            self.address = f"unix:{self._path}"
            return
        self.socket = _bind_tcp(options.host.removeprefix("[").removesuffix("]"), options.port)
        host, port = self.socket.getsockname()[:2]
        self.address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def close(self) -> None:
        """Close the socket, and remove the file of a unix socket unless another server has replaced it."""
        self.socket.close()
        with contextlib.suppress(OSError):
            if self._file is not None and os.path.samestat(self._path.stat(), self._file):
                self._path.unlink()

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _bind_tcp(host: str, port: int) -> socket.socket:
    """Return a socket that shares its port with no other one. Its front ends share the socket itself."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    # Ports of closed connections may be used again. Unlike SO_REUSEPORT, this allows no second listening socket.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _listen(listener, (host, port), f"{f'[{host}]' if ':' in host else host}:{port}", "--host and --port")
    return listener


def _bind_unix(path: Path) -> socket.socket:
    """Return a socket at ``path``, in place of one that a killed server has left. Its mode depends on the umask."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if _is_left_over(path):
        with contextlib.suppress(OSError):  # binding then reports that the path is in use
            path.unlink()
    _listen(listener, str(path), str(path), "--uds")
    return listener


def _listen(listener: socket.socket, address: str | tuple[str, int], name: str, flags: str) -> None:
    """Bind and listen. Close the socket and raise ConfigError if the address cannot be used."""
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror or error}"
        raise ConfigError(f"{name} {reason}: set {flags}") from None


def _is_left_over(path: Path) -> bool:
    """Whether ``path`` is a socket on which no process listens."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)  # the listener's queue may be full
            probe.connect(str(path))
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
