"""Unsupported inputs (images, audio, files, embeddings, adapters): refused by field name, and never fetched."""

import base64
import socket
import zlib
from typing import Any

import pytest
from abuse import CHAT, assert_refused, check_error
from abused_app import AbusedApp


def png(width: int, height: int, data: bytes = b"") -> str:
    """Return a data URL of a PNG whose header has this size in pixels."""
    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(data)), (b"IEND", b"")]
    whole = b"\x89PNG\r\n\x1a\n" + b"".join(
        len(body).to_bytes(4, "big") + name + body + zlib.crc32(name + body).to_bytes(4, "big") for name, body in chunks
    )
    return "data:image/png;base64," + base64.b64encode(whole).decode()


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


URLS: list[Any] = [
    *(png(1, 1, bytes(4)), png(0, 0), png(65_535, 65_535), png(2**31 - 1, 2**31 - 1), png(1, 1)[:60]),
    png(9, 9, bytes(10**7)),
    *("file:///etc/passwd", "http://169.254.169.254/latest/meta-data", "http://127.0.0.1:1/", "http://[::1]/x.png"),
    *("https://example.com/redirect", "http://0x7f000001/", "http://localhost/", "ftp://x/y", "gopher://x"),
    "//host/x.png",
    *("data:text/html;base64,PHNjcmlwdD4=", "data:image/png;base64,!!!!", "data:image/gif;base64,R0lGODlh", "data:,"),
    "",
    *("data:video/jpeg;base64," + "/9j/" * 5000, "javascript:alert(1)", "../../etc/passwd", "x" * 10**6),
    *("http://a b/", "\x00"),
    *(7, None, [], {}, True),
]
PARTS: list[Any] = [
    *(
        {"type": kind, kind: {"url": "http://x/y"}}
        for kind in ("image_url", "video_url", "audio_url", "image", "video")
    ),
    *(
        {"type": kind, kind: {}}
        for kind in ("input_audio", "file", "image_embeds", "input_image", "audio_embeds", "pdf")
    ),
    *(
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
        for data in ("UklGRg==", "", "x" * 10**6)
    ),
    *({"type": "file", "file": {name: "x"}} for name in ("file_id", "file_data", "filename")),
    *({"type": kind} for kind in (7, None, [], "", "text", "TEXT", "x" * 10**6, "image_url\n")),
    *({"type": "text", "text": text} for text in (7, None, [], {})),
    *(7, None, "x", [], {}, {"text": "x"}, {"image_url": {"url": "http://x"}}),
    {"type": "image_url", "image_url": "http://x", "text": "x"},
]


def test_images_are_refused_by_name(app: AbusedApp) -> None:
    for url in URLS:
        content = [{"type": "text", "text": "what is this?"}, image(url)]
        response = app.chat(messages=[{"role": "user", "content": content}])
        assert_refused(response, 400, "messages[0].content[1].type", "text only")


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


@pytest.mark.parametrize("count", [1, 1000, 20_000])
def test_many_images(count: int, app: AbusedApp) -> None:
    response = app.request(
        "POST", CHAT, json={"messages": [{"role": "user", "content": [image("http://x/y")] * count}]}
    )
    assert response.status_code in (400, 413) and check_error(response)


def test_parts_other_than_text(app: AbusedApp) -> None:
    for part in PARTS:
        for role in ("user", "system", "assistant", "tool"):
            messages = [{"role": role, "content": [part]}, {"role": "user", "content": "x"}]
            error = assert_refused(app.chat(messages=messages), 400)
            assert error["param"].startswith("messages[0].content[0]")


TENSOR_FIELDS = ("prompt_embeds", "inputs_embeds", "input_embeds", "mm_features", "multi_modal_data")
TENSORS: list[Any] = [
    *("gASVJAAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAlpZCA+IC90bXCUhZRSlC4=", "", "x" * 10**6, "AAAA", "UEsDBBQ="),
    *(7, [], [[]], [[1.0]], [1.0] * 1000, {"data": "x"}, True, [["NaN"]], {"dtype": "float32", "shape": [2**40]}),
]
ADAPTER_FIELDS = ("lora", "lora_name", "lora_path", "lora_request", "adapter", "lora_modules")
ADAPTER_NAMES = ("x", "../../etc/passwd", "/etc/passwd", "http://x/y", "hf://a/b", "", "x" * 10**6, "a\x00b")
ADAPTERS: list[Any] = [*ADAPTER_NAMES, 7, [], {}, True]
ADAPTER_MODELS = (*ADAPTER_NAMES, "quire-demo/../x", "quire-demo:x")


def test_embeddings_are_refused_by_name(app: AbusedApp) -> None:
    for name in TENSOR_FIELDS:
        for value in filter(None, TENSORS):
            assert_refused(app.complete(**{name: value}), 400, name, "is not supported")


def test_adapters_are_refused_by_name(app: AbusedApp) -> None:
    for name in ADAPTER_FIELDS:
        for value in filter(None, ADAPTERS):
            assert_refused(app.complete(**{name: value}), 400, name, "is not supported: name the adapter as model")


def test_adapter_as_model_is_not_found(app: AbusedApp) -> None:
    for model in ADAPTER_MODELS:
        assert_refused(app.complete(model=model), 404, "model")


def test_unsupported_routes_are_not_found(app: AbusedApp) -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/files", "/v1/images/generations"):
        assert_refused(app.post(path, {"lora_name": "x", "lora_path": "/etc"}), 404)
