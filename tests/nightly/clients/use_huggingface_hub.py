"""huggingface_hub: InferenceClient, with the address of the server."""

import json
from typing import Any

from checks import KEY, MODEL, URL, all_called, report, tool_results
from conversations import (
    AS_JSON,
    FINAL,
    FUNCTION,
    GOODBYE,
    GREETING,
    HELLO,
    NEXT,
    OBJECT,
    QUESTION,
    THANKS,
    WEATHER,
    WELCOME,
)
from huggingface_hub import InferenceClient

client = InferenceClient(base_url=URL, api_key=KEY)
TOOLS: Any = [{"type": "function", "function": FUNCTION}]


def chat_second_turn() -> None:
    messages: list[Any] = [{"role": "user", "content": GREETING}]
    first = client.chat.completions.create(messages, model=MODEL).choices[0].message
    messages += [first, {"role": "user", "content": NEXT}]
    second = client.chat.completions.create(messages, model=MODEL).choices[0].message
    assert (first.content, second.content) == (HELLO, GOODBYE)


def chat_tool_loop() -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while (answer := client.chat_completion(messages, model=MODEL, tools=TOOLS).choices[0].message).tool_calls:
        messages.append(answer)
        messages += tool_results(answer)
    all_called()
    messages += [answer, {"role": "user", "content": THANKS}]
    second = client.chat_completion(messages, model=MODEL, tools=TOOLS).choices[0].message
    assert (answer.content, second.content) == (FINAL, WELCOME)


def chat_stream() -> None:
    messages: list[Any] = [{"role": "user", "content": GREETING}]
    chunks = list(client.chat_completion(messages, model=MODEL, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == HELLO


def chat_structured() -> None:
    messages: list[Any] = [{"role": "user", "content": AS_JSON}]
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    answer = client.chat_completion(messages, model=MODEL, response_format=wanted)
    assert json.loads(answer.choices[0].message.content) == OBJECT


report([chat_second_turn, chat_tool_loop, chat_stream, chat_structured], "huggingface_hub")
