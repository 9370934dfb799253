"""Unsupported inputs (images, audio, files, embeddings, adapters): refused by field name, and never fetched."""

import socket
from typing import Any

import pytest
from abuse import CHAT, assert_refused, check_error
from abused_app import AbusedApp


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


FORMS = (
    *("http://{}/x.png", "https://{}/x.png", "//{}/x.png", "HTTP://{}/", "http://u:p@{}/", "http:{}/", "ftp://{}/x"),
    *("http://{}/redirect?to=http://{}/", " http://{}/", "\thttp://{}/", "http://{}/\r\nx: y", "ws://{}/", "{}"),
)
KINDS = ("image_url", "video_url", "audio_url")


def test_nothing_is_fetched(app: AbusedApp) -> None:
    """The server makes no connection to the named address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        for form in FORMS:
            url = form.replace("{}", f"localhost:{listener.getsockname()[1]}")
            for kind in KINDS:
                response = app.chat(messages=[{"role": "user", "content": [{"type": kind, kind: {"url": url}}]}])
                assert_refused(response, 400, "messages[0].content[0].type", "text only")
                with pytest.raises(BlockingIOError):
                    listener.accept()


def test_many_images(app: AbusedApp) -> None:
    response = app.request(
        "POST", CHAT, json={"messages": [{"role": "user", "content": [image("http://x/y")] * 20_000}]}
    )
    assert response.status_code in (400, 413) and check_error(response)
