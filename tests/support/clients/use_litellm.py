"""litellm, through its providers ``hosted_vllm`` and ``openai``, and its Responses and Messages."""

from typing import Any, Literal

import litellm
from checks import KEY, MODEL, SERVER, URL, all_called, called, look_up, look_up_json, report
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
            messages += _results(answer)
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
            messages += _results(answer.choices[0].message)
        all_called()
        assert answer.choices[0].message.content == FINAL


def _results(answer: Any) -> list[Any]:
    return [
        {"role": "tool", "tool_call_id": call.id, "content": look_up_json(call.function.arguments)}
        for call in answer.tool_calls or []
    ]


def chat_structured() -> None:
    for provider in PROVIDERS:
        messages = [{"role": "user", "content": AS_JSON}]
        answer = litellm.completion(messages=messages, response_format=Weather, **_fields(provider))
        assert Weather.model_validate_json(answer.choices[0].message.content) == Weather(**OBJECT)


def responses_tool_loop() -> None:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(len(DEGREES) + 1):
        response = litellm.responses(input=items, tools=RESPONSES_TOOLS, **_fields("openai"))
        items += [item.model_dump(exclude_none=True) for item in response.output]
        items += [
            {"type": "function_call_output", "call_id": item.call_id, "output": look_up_json(item.arguments)}
            for item in response.output
            if item.type == "function_call"
        ]
    all_called()
    assert response.output_text == FINAL


async def messages_tool_loop() -> None:
    tools: Any = [{"name": "temperature", "input_schema": FUNCTION["parameters"]}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(len(DEGREES) + 1):
        answer: Any = await litellm.anthropic.messages.acreate(
            model=f"anthropic/{MODEL}", api_base=SERVER, api_key=KEY, max_tokens=300, messages=messages, tools=tools
        )
        messages.append({"role": "assistant", "content": answer["content"]})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": look_up(**block["input"])}
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    all_called()
    assert answer["content"][-1]["text"] == FINAL


report(
    [chat_second_turn, chat_tool_loop, chat_stream, chat_structured, responses_tool_loop, messages_tool_loop],
    "litellm",
)
