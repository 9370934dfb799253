"""Checks of the settings that restrict access to the server, before a process starts."""

import re

from quire.launch.config.serve_options import ServeOptions
from quire.protocol.errors import ConfigError

ANY = "*"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/@?#*]+", re.IGNORECASE)
# A host name or an address, and a port.
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[\w.-]+)(?::\d{1,5})?", re.IGNORECASE | re.ASCII)


def check_network(options: ServeOptions) -> None:
    """Raise ConfigError for an origin or a host name that no request could have."""
    for origin in options.allowed_origins or ():
        if origin not in (ANY, "null") and not ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--allowed-origins must be *, null or scheme://host[:port] without a path (got {origin[:64]!r})"
            )
    for host in options.allowed_hosts or ():
        found = HOST.fullmatch(host.removeprefix("*."))
        if host != ANY and (found is None or found[1] != found[0]):
            raise ConfigError(f"--allowed-hosts must be host names without a port, *.NAME or * (got {host[:64]!r})")
