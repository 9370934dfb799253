"""anthropic: Messages, with and without streams, and the SDK's own loop over tools."""

from typing import Any, Literal

import anthropic
from checks import KEY, MODEL, SERVER, all_called, look_up, report
from conversations import AS_JSON, FINAL, FUNCTION, GOODBYE, GREETING, HELLO, NEXT, OBJECT, QUESTION, THANKS, WELCOME
from pydantic import BaseModel

client = anthropic.Anthropic(base_url=SERVER, api_key=KEY, max_retries=0)
FIELDS: Any = {"model": MODEL, "max_tokens": 300}
TOOLS: Any = [
    {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
]


class Weather(BaseModel):
    city: Literal["Rome"]
    degrees: Literal[21]


def messages_second_turn() -> None:
    messages: list[Any] = [{"role": "user", "content": GREETING}]
    first = client.messages.create(messages=messages, **FIELDS)
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": NEXT}]
    second = client.messages.create(messages=messages, **FIELDS)
    assert [answer.content[0].text for answer in (first, second)] == [HELLO, GOODBYE]
    counted = client.messages.count_tokens(messages=messages, model=MODEL).input_tokens
    assert counted == second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0)


def messages_tool_loop() -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        answer = client.messages.create(messages=messages, tools=TOOLS, **FIELDS)
        messages.append({"role": "assistant", "content": answer.content})
        if answer.stop_reason != "tool_use":
            break
        messages.append({"role": "user", "content": _results(answer)})
    all_called()
    assert answer.content[-1].text == FINAL
    messages.append({"role": "user", "content": THANKS})
    assert client.messages.create(messages=messages, tools=TOOLS, **FIELDS).content[0].text == WELCOME


def messages_stream() -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        with client.messages.stream(messages=messages, tools=TOOLS, **FIELDS) as stream:
            answer = stream.get_final_message()
        messages.append({"role": "assistant", "content": answer.content})
        if answer.stop_reason != "tool_use":
            break
        messages.append({"role": "user", "content": _results(answer)})
    all_called()
    assert answer.content[-1].text == FINAL


def _results(answer: Any) -> list[Any]:
    return [
        {"type": "tool_result", "tool_use_id": block.id, "content": look_up(**block.input)}
        for block in answer.content
        if block.type == "tool_use"
    ]


@anthropic.beta_tool(name="temperature")
def temperature(city: str) -> str:
    """Return the temperature in a city.

    Args:
        city: The name of the city.
    """
    return look_up(city)


def messages_tool_runner() -> None:
    question: Any = [{"role": "user", "content": QUESTION}]
    for stream in (False, True):
        runner: Any = client.beta.messages.tool_runner(tools=[temperature], messages=question, stream=stream, **FIELDS)
        answer = runner.until_done()
        assert answer.content[-1].text == FINAL
        if not stream:
            all_called()


def messages_structured() -> None:
    messages: Any = [{"role": "user", "content": AS_JSON}]
    answer = client.messages.parse(messages=messages, output_format=Weather, **FIELDS)
    assert answer.parsed_output == Weather(**OBJECT)


def messages_cached_tokens() -> None:
    """They are counted at the start of a stream, behind a header of the system prompt that changes."""
    for version in (1, 2):
        header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version={version}; cch=0000{version};"}
        system: Any = [header, {"type": "text", "text": GREETING * 4}]
        with client.messages.stream(system=system, messages=[{"role": "user", "content": NEXT}], **FIELDS) as stream:
            usage = next(event for event in stream if event.type == "message_start").message.usage
    assert usage.cache_read_input_tokens >= 16 >= usage.input_tokens


report(
    [
        messages_second_turn,
        messages_tool_loop,
        messages_stream,
        messages_tool_runner,
        messages_structured,
        messages_cached_tokens,
    ],
    "anthropic",
)
