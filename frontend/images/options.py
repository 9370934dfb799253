"""Limits on the images of requests, and what reads them."""

import os
import re
from collections.abc import Iterable

import msgspec

from quire.protocol.errors import ConfigError, printable

_DOMAIN = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:\d{1,5})?")


class ImageOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    max_images: most images of one prompt.
    max_bytes: largest file.
    max_pixels: most pixels of an image, which are known before it is decoded.
    domains: hosts that images are fetched from: ``name``, ``*.name``, with ``:port`` unless that is the scheme's.
    num_helpers: processes that decode and process; 0: one per core, at most 4.
    memory_bytes: shared memory for images of requests and those kept for later ones. New images are refused when it
        is full.
    """

    max_images: int = 64
    max_bytes: int = 20 * 2**20
    max_pixels: int = 50_000_000
    domains: tuple[str, ...] = ()
    num_helpers: int = 0
    memory_bytes: int = 4 * 2**30

    @property
    def helpers(self) -> int:
        return self.num_helpers or min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4)


def check_domains(domains: Iterable[str]) -> None:
    """Raise ConfigError for a domain that no URL could have."""
    for domain in domains:
        if not _DOMAIN.fullmatch(domain):
            allowed = "host names in lower case, as NAME, *.NAME or NAME:PORT"
            raise ConfigError(f"--allowed-media-domains must be {allowed} (got {printable(domain)})")
