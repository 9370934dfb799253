"""Attacks by images: damaged files, and URLs that lead inside. Each must end one request and nothing else."""

import re
import time
from collections import Counter
from collections.abc import Iterable

from image_files import data_url, image_file
from image_hosts import ALLOWED, Resolver, Server

from quire.frontend.images.fetch import Fetcher
from quire.frontend.images.reader import ImageReader
from quire.frontend.images.refused import Refused
from quire.frontend.images.source import ImageSource
from quire.protocol.errors import InvalidRequest

WHERE = "messages[0].content[0].image_url.url"
CANARY_EVERY = 50


def attack_with_files(reader: ImageReader, files: Iterable[bytes]) -> Counter[str]:
    """Read the files one by one and return how many ended how; ``slowest_ms`` is the longest time of one.

    Raises:
        AssertionError: a whole image is not read as before, or an error is not one line about the field.
    """
    found: Counter[str] = Counter()
    canary = reader.read_now([ImageSource(WHERE, data_url(image_file("PNG", (60, 60))))])[0].digest
    for number, data in enumerate(files):
        began = time.monotonic()
        try:
            [image] = reader.read_now([ImageSource(WHERE, data_url(data))])
            assert image.num_rows > 0
            found["read"] += 1
        except InvalidRequest as refused:
            assert refused.param == WHERE and refused.message.isprintable() and len(refused.message) < 300
            assert not re.search(r"/(dev|tmp|work|usr)|Error|Traceback", refused.message)
            found[re.sub(r" \(got.*", "", refused.message.removeprefix(f"{WHERE} "))] += 1
        found["slowest_ms"] = max(found["slowest_ms"], round(1000 * (time.monotonic() - began)))
        if number % CANARY_EVERY == 0:  # other bytes each time, so that it is decoded anew
            whole = image_file("PNG", (60, 60)) + number.to_bytes(4, "little")
            assert reader.read_now([ImageSource(WHERE, data_url(whole))])[0].digest == canary
    return found


def attack_with_urls(server: Server, urls: Iterable[str], seconds: float = 10.0) -> Counter[str]:
    """Fetch the URLs, none of which may be answered; return how many were refused for which reason."""
    resolver, found = Resolver(server.server_port), Counter[str]()
    fetcher = Fetcher(ALLOWED, 100_000, seconds, resolver)
    for url in urls:
        try:
            fetcher.fetch(url)
            raise AssertionError(url)
        except Refused as refused:
            assert refused.text.isprintable() and len(refused.text) < 300
            found[re.sub(r" \(got.*", "", refused.text)] += 1
    assert not any("secret" in path and "/to/" not in path for path in server.paths), "an inner address was reached"
    assert all(name == "cdn.example.com" or name.endswith(".cdn.example.com") for name in resolver.resolved)
    return found
