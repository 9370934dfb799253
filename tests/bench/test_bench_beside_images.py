"""``quire bench serve --images``: what is sent, and the figures of its phases."""

import argparse
import asyncio
import base64
import io

import httpx
import pytest

from quire.bench import beside_images
from quire.bench.measure.http_client import ServerClient, Timing


def test_sends_an_image_that_no_cache_has() -> None:
    image = pytest.importorskip("PIL.Image")
    first, second = beside_images.random_image(), beside_images.random_image()
    head, _, body = first.partition(",")
    assert head == "data:image/png;base64" and first != second
    with image.open(io.BytesIO(base64.b64decode(body))) as found:
        assert found.convert("RGB").size == (beside_images.WIDTH, beside_images.HEIGHT)


@pytest.mark.full
def test_compares_the_phases_and_counts_images_that_fail() -> None:
    """The images are sent to a port on which nothing listens."""
    names = ("images", "rounds", "num_prompts", "input_len", "concurrency", "rate", "max_tokens", "chat")
    args = argparse.Namespace(url="http://127.0.0.1:1", api_key=None, **dict.fromkeys(names, 2))
    gauges = "quire:encoder_cache_used_tokens 7\nquire:encoder_cache_size_tokens 9\n"

    async def phase(number: int) -> list[Timing]:
        step = 0.015 if number % 2 else 0.010
        return [Timing(0.0, chunks=[step * index for index in range(10)])]

    async def main() -> beside_images.RunReport:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, text=gauges))
        async with ServerClient("http://server", None, transport) as client:
            return await beside_images.measure(args, client, "m", phase)

    found = asyncio.run(main()).results
    assert found["p99_ratios"] == [1.5, 1.5] and found["p99_ratio"] == 1.5
    assert (found["most_rows_in_encoder_cache"], found["rows_of_encoder_cache"]) == (7, 9)
    assert found["images_answered"] == 0 and found["errors"]["no image was answered"] == 1
    assert any(kind.startswith("connection") for kind in found["errors"])
