"""Addresses of node agents, ``tcp://HOST:PORT``, and this machine's own address towards them."""

import ipaddress
import re
import socket

from quire.protocol.errors import ConfigError

_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
"""A part of a name. With others, ``getaddrinfo`` raises a UnicodeError instead of an OSError."""


def parse_address(text: str, flag: str) -> tuple[str, int]:
    """Return host and port of ``tcp://HOST:PORT``.

    Args:
        flag: the flag that has the address, for the error.

    Raises:
        ConfigError: it is no such address.
    """
    found = re.fullmatch(rf"tcp://({_LABEL}(?:\.{_LABEL})*\.?):(\d{{1,5}})", text)
    if found is None or not 0 < int(found[2]) < 65536:
        raise ConfigError(f"{flag} must be tcp://ADDRESS:PORT with a port between 1 and 65535 (got {text[:100]!r})")
    return found[1], int(found[2])


def ip_addresses(host: str) -> list[str]:
    """Return the IPv4 addresses of a name, sorted. Raises OSError if the name is not known."""
    found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)}
    return sorted(found, key=ipaddress.IPv4Address)


def own_address(node: str) -> str:
    """Return the address of this machine by which a machine with the IPv4 address ``node`` reaches it.

    Raises OSError without a route to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        probe.connect((node, 9))
        return str(probe.getsockname()[0])


class ReservedPort:
    """A free TCP port that stays free for a socket with SO_REUSEADDR, which those of ZeroMQ and torch have.

    A bound socket that does not listen keeps the port from other programs, but not from such a socket.
    """

    def __init__(self, address: str = "") -> None:
        """Raises OSError if this machine does not have the address. "": any address."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((address, 0))
        except OSError:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()
