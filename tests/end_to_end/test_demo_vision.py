"""The demo model for images, asked as clients do."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from PIL import Image, ImageDraw, ImageFont
from served import Served

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    server = Served("demo-vision")
    yield server
    server.end()


def encoded(kind: str, color: str) -> str:
    """Return a PNG file of one thing, in base64."""
    image = Image.new("RGB", (180, 140), "white")
    pen = ImageDraw.Draw(image)
    if kind == "circle":
        pen.ellipse((50, 30, 130, 110), fill=color)
    else:
        pen.text((90, 70), kind, fill=color, font=ImageFont.load_default(110), anchor="mm")
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def part(file: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{file}"}}


def test_a_conversation_about_two_pictures(server: Served) -> None:
    circle, one = encoded("circle", "red"), encoded("1", "green")
    messages: list[dict[str, Any]] = []
    answers, usages = [], []
    for asked in (
        [part(circle), {"type": "text", "text": "What is in this image?"}],
        [part(one), {"type": "text", "text": "What is this?"}],
    ):
        messages.append({"role": "user", "content": asked})
        body = {"messages": messages, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
        messages.append(answer["choices"][0]["message"])
        answers.append(messages[-1]["content"])
        usages.append(answer["usage"]["prompt_tokens_details"])
    assert answers == ["A red circle.", "A green 1."]
    assert [usage["image_tokens"] for usage in usages] == [36, 72]
    assert usages[1]["cached_tokens"] >= 48, "blocks with the first picture are found again"

    source = {"type": "base64", "media_type": "image/png", "data": one}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "Which digit is it?"}]
    asked = {"max_tokens": 20, "temperature": 0, "messages": [{"role": "user", "content": content}]}
    third = httpx.post(f"{server.url}/v1/messages", json={"model": "demo-vision", **asked}, timeout=60).json()
    assert third["content"][0]["text"] == "The digit is 1."
    assert server.metrics()["quire:num_encoder_runs_total"] == 2, "one of each picture"


def test_decisions_about_two_pictures(server: Served) -> None:
    """All questions about a picture, which are prompts of their own, share it."""
    before = server.metrics()["quire:num_encoder_runs_total"]
    choices = [{"value": "A blue circle."}, {"value": "A red 3."}]
    asked = [{"type": "choice", "instructions": f"What is in image {i}?", "choices": choices} for i in "ABC"]
    for kind, color, value in (("circle", "blue", "A blue circle."), ("3", "red", "A red 3.")):
        image = {"type": "input_image", "image_url": f"data:image/png;base64,{encoded(kind, color)}"}
        given = [{"role": "user", "content": [image, {"type": "input_text", "text": "What is in this image?"}]}]
        answer = httpx.post(f"{server.url}/v1/decisions", json={"input": given, "questions": asked}, timeout=60).json()
        assert [each["choice"] for each in answer["answers"]] == [value] * 3
    assert server.metrics()["quire:num_encoder_runs_total"] - before == 2, "one of each picture"
