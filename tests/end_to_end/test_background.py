"""Responses in the background of a server, whose front ends are killed."""

from typing import Any

import httpx
import openai
import pytest
from served import Served
from waits import wait_for

pytestmark = pytest.mark.full

FIELDS: dict[str, Any] = {
    "input": "Tell me a story.",
    "background": True,
    "stream": True,
    "max_output_tokens": 400,
    "extra_body": {"ignore_eos": True, "seed": 7},
}


def text_of(events: Any, after: int, most: int | None = None) -> tuple[str, str, int]:
    """Return the id, the text and the last number of a stream's events, which begin after number ``after``."""
    text, response_id = "", ""
    for event in events:
        assert event.sequence_number == after + 1
        after = event.sequence_number
        response_id = event.response.id if hasattr(event, "response") else response_id
        text += event.delta if event.type == "response.output_text.delta" else ""
        if after == most:
            break
    events.close()
    return response_id, text, after


def test_a_killed_front_end_loses_no_response(demo_server: Served) -> None:
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="unused", max_retries=10) as client:
        _, whole, _ = text_of(client.responses.create(**FIELDS), -1)
        response_id, begin, number = text_of(client.responses.create(**FIELDS), -1, 60)
        stored = client.responses.create(input="hello", max_output_tokens=4)
        for front_end in demo_server.members("frontend"):
            front_end.kill()

        def is_continued() -> bool:
            try:
                return client.responses.retrieve(response_id).status not in ("queued", "failed")
            except openai.APIConnectionError:  # no front end has been started again yet
                return False

        wait_for(is_continued, 120)
        rest = client.responses.retrieve(response_id, stream=True, starting_after=number)
        _, end, last = text_of(rest, number)
        assert begin + end == whole
        shown = client.responses.retrieve(response_id)
        assert (shown.output_text, shown.status) == (whole, "incomplete")
        events = httpx.get(f"{demo_server.url}/v1/responses/{response_id}?stream=true").text
        assert events.count("\n\n") == last + 2  # with the end mark
        assert client.responses.retrieve(stored.id).output == stored.output
