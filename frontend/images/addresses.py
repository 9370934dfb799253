"""Addresses that images may be fetched from: public ones."""

import ipaddress
import socket
from collections.abc import Callable

from quire.frontend.images.refused import Refused

_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_6TO4 = ipaddress.IPv6Network("2002::/16")
_OF_CLOUDS = [ipaddress.IPv4Network(network) for network in ("168.63.129.16/32", "192.0.0.0/24")]
"""Addresses that look public, at which machines of Azure and Oracle's cloud reach the services for themselves."""


Resolve = Callable[[str, int], list[tuple[str, int]]]
"""Returns the addresses of a host that may be connected to, at least one, with the port. Raises Refused."""


def resolve_public(host: str, port: int) -> list[tuple[str, int]]:
    """Return the addresses of a host by one look-up. All must be public: a name with both kinds is an attack."""
    try:
        found = [str(place[0]) for *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except (OSError, ValueError):  # ValueError: a label that is too long
        found = []
    if not found or not all(map(is_public, found)):
        # One text for both, so that it does not tell which names exist in this network.
        raise Refused("names a host without a public address")
    return [(address, port) for address in found]


def is_public(text: str) -> bool:
    """Return whether an address is unicast, of the public internet, and of no service of this machine's cloud.

    Of IPv6 only 2000::/3 is: elsewhere are the forms that contain an IPv4 address (mapped, compatible, NAT64), and 6to4
    is left out for the same reason.
    """
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address) and (address not in _GLOBAL_UNICAST or address in _6TO4):
        return False
    if any(address in network for network in _OF_CLOUDS):
        return False
    return address.is_global and not address.is_multicast
