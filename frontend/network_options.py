"""Checks of the settings that restrict access to the server, before a process starts."""

import re
from typing import TYPE_CHECKING

from quire.frontend.serve_options import ServeOptions
from quire.protocol.errors import ConfigError, printable

if TYPE_CHECKING:
    from ssl import SSLContext

ANY = "*"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/@?#*]+", re.IGNORECASE)
ROOT_PATH = re.compile(r"(/[\w.~-]+)+/?", re.ASCII)
# A host name or an address, and a port.
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[\w.-]+)(?::\d{1,5})?", re.IGNORECASE | re.ASCII)
MEDIA_DOMAIN = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:\d{1,5})?")


def check_network(options: ServeOptions) -> None:
    """Raise ConfigError for an unusable certificate, and an origin, host name or path that no request could have."""
    tls_context(options)
    if options.root_path and not ROOT_PATH.fullmatch(options.root_path):
        raise ConfigError(f"--root-path must be a path such as /quire (got {options.root_path[:64]!r})")
    for origin in options.allowed_origins or ():
        if origin not in (ANY, "null") and not ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--allowed-origins must be *, null or scheme://host[:port] without a path (got {origin[:64]!r})"
            )
    for host in options.allowed_hosts or ():
        found = HOST.fullmatch(host.removeprefix("*."))
        if host != ANY and (found is None or found[1] != found[0]):
            raise ConfigError(f"--allowed-hosts must be host names without a port, *.NAME or * (got {host[:64]!r})")
    for domain in options.allowed_media_domains or ():
        if not MEDIA_DOMAIN.fullmatch(domain):
            allowed = "host names in lower case, as NAME, *.NAME or NAME:PORT"
            raise ConfigError(f"--allowed-media-domains must be {allowed} (got {printable(domain)})")


def tls_context(options: ServeOptions) -> "SSLContext | None":
    """Return the context of ``--ssl-certfile``, or None without it.

    Raises:
        ConfigError: certificate and key cannot be read or do not belong together.
    """
    certificate, key = options.ssl_certfile, options.ssl_keyfile
    if certificate is None:
        if key is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        return None
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # TLS 1.2 and later
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        files = certificate if key is None else f"{certificate} and {key}"
        raise ConfigError(f"--ssl-certfile, --ssl-keyfile: {files} cannot be used: {reason}") from None
    return context


def _no_password() -> str:
    """Prevent OpenSSL from asking at the terminal."""
    raise ValueError("the key is encrypted")
