"""litellm, through its providers ``hosted_vllm`` and ``openai``, and its Responses and Messages."""

from typing import Any, Literal

import litellm
from checks import KEY, MODEL, SERVER, URL, all_called, called, look_up, look_up_json, report, tool_results
from conversations import AS_JSON, DEGREES, FINAL, FUNCTION, GOODBYE, GREETING, HELLO, NEXT, OBJECT, QUESTION
from pydantic import BaseModel

PROVIDERS = ("hosted_vllm", "openai")
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
RESPONSES_TOOLS: Any = [{"type": "function", "strict": True, **FUNCTION}]


class Weather(BaseModel):
    city: Literal["Rome"]
    degrees: Literal[21]


def _fields(provider: str) -> dict[str, Any]:
    return {"model": f"{provider}/{MODEL}", "api_base": URL, "api_key": KEY}


def chat_second_turn() -> None:
    for provider in PROVIDERS:
        messages: list[Any] = [{"role": "user", "content": GREETING}]
        first = litellm.completion(messages=messages, **_fields(provider)).choices[0].message
        for sent in (first, first.model_dump(), first.json()):
            messages[1:] = [sent, {"role": "user", "content": NEXT}]
            second = litellm.completion(messages=messages, **_fields(provider)).choices[0].message
            assert (first.content, second.content) == (HELLO, GOODBYE)


def chat_tool_loop() -> None:
    for provider in PROVIDERS:
        called.clear()
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        for turn in range(len(DEGREES) + 1):
            answer = litellm.completion(messages=messages, tools=TOOLS, **_fields(provider)).choices[0].message
            messages.append(answer)
            assert bool(answer.tool_calls) == (turn < len(DEGREES))
            messages += tool_results(answer)
        all_called()
        assert answer.content == FINAL


def chat_stream() -> None:
    for provider in PROVIDERS:
        called.clear()
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        for _ in range(len(DEGREES) + 1):
            chunks = list(litellm.completion(messages=messages, tools=TOOLS, stream=True, **_fields(provider)))
            answer: Any = litellm.stream_chunk_builder(chunks, messages=messages)
            messages.append(answer.choices[0].message)
            messages += tool_results(answer.choices[0].message)
        all_called()
        assert answer.choices[0].message.content == FINAL


def chat_structured() -> None:
    for provider in PROVIDERS:
        messages = [{"role": "user", "content": AS_JSON}]
        answer = litellm.completion(messages=messages, response_format=Weather, **_fields(provider))
        assert Weather.model_validate_json(answer.choices[0].message.content) == Weather(**OBJECT)


def responses_second_turn() -> None:
    first: Any = litellm.responses(input=GREETING, **_fields("openai"))
    second: Any = litellm.responses(input=NEXT, previous_response_id=first.id, **_fields("openai"))
    assert (first.output_text, second.output_text) == (HELLO, GOODBYE)


def responses_tool_loop() -> None:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(len(DEGREES) + 1):
        response: Any = litellm.responses(input=items, tools=RESPONSES_TOOLS, **_fields("openai"))
        items += _items(response)
    all_called()
    assert response.output_text == FINAL


def responses_stream() -> None:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(len(DEGREES) + 1):
        events: Any = litellm.responses(input=items, tools=RESPONSES_TOOLS, stream=True, **_fields("openai"))
        response = [event for event in events if event.type == "response.completed"][-1].response
        items += _items(response)
    all_called()
    assert response.output_text == FINAL


def _items(response: Any) -> list[Any]:
    """Return the output, as items of the next input, and the results of its calls."""
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": look_up_json(item.arguments)}
        for item in response.output
        if item.type == "function_call"
    ]
    return [*(item.model_dump(exclude_none=True) for item in response.output), *results]


async def _message(messages: list[Any], **fields: Any) -> Any:
    server: Any = {"model": f"anthropic/{MODEL}", "api_base": SERVER, "api_key": KEY, "max_tokens": 300}
    return await litellm.anthropic.messages.acreate(messages=messages, **server, **fields)


async def messages_second_turn() -> None:
    messages: list[Any] = [{"role": "user", "content": GREETING}]
    first = await _message(messages)
    messages += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": NEXT}]
    second = await _message(messages)
    assert [answer["content"][0]["text"] for answer in (first, second)] == [HELLO, GOODBYE]


async def messages_tool_loop() -> None:
    tools = [{"name": "temperature", "input_schema": FUNCTION["parameters"]}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(len(DEGREES) + 1):
        answer = await _message(messages, tools=tools)
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": look_up(**block["input"])}
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]
    all_called()
    assert answer["content"][-1]["text"] == FINAL


report(
    [
        *(chat_second_turn, chat_tool_loop, chat_stream, chat_structured),
        *(responses_second_turn, responses_tool_loop, responses_stream),
        *(messages_second_turn, messages_tool_loop),
    ],
    "litellm",
)
