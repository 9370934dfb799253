"""ollama: chat, generate, vectors and lists; and what VS Code asks of Ollama before a chat."""

import json
import urllib.request
from typing import Any

import ollama
from checks import MODEL, SERVER, all_called, look_up, report
from conversations import (
    AS_JSON,
    DEGREES,
    FINAL,
    GOODBYE,
    GREETING,
    HELLO,
    NEXT,
    OBJECT,
    QUESTION,
    THANKS,
    WEATHER,
    WELCOME,
    temperature,
)

client = ollama.Client(SERVER)


def ollama_second_turn() -> None:
    messages: list[Any] = [{"role": "user", "content": GREETING}]
    first = client.chat(f"{MODEL}:latest", messages).message
    second = client.chat(MODEL, [*messages, first, {"role": "user", "content": NEXT}]).message
    assert (first.content, second.content) == (HELLO, GOODBYE)


def ollama_tool_loop() -> None:
    """The SDK describes the function, and drops the ids of calls."""
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        answer = client.chat(MODEL, messages, tools=[temperature], think=True)
        messages.append(answer.message)
        if not answer.message.tool_calls:
            break
        for made in answer.message.tool_calls:
            content = look_up(**made.function.arguments)
            messages.append({"role": "tool", "tool_name": made.function.name, "content": content})
    all_called()
    assert messages[1].thinking.strip() == "Rome comes first."
    answer = client.chat(MODEL, [*messages, {"role": "user", "content": THANKS}])
    assert (messages[-1].content, answer.message.content) == (FINAL, WELCOME)
    assert answer.done_reason == "stop" and answer.eval_count and answer.eval_duration and answer.total_duration


def ollama_stream() -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(len(DEGREES) + 1):
        parts = [*client.chat(MODEL, messages, tools=[temperature], stream=True)]
        assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
        calls = [made for part in parts for made in part.message.tool_calls or ()]
        text = "".join(part.message.content or "" for part in parts)
        messages.append({"role": "assistant", "content": text, "tool_calls": calls})
        messages += [{"role": "tool", "content": look_up(**made.function.arguments)} for made in calls]
    all_called()
    assert text == FINAL


def ollama_structured() -> None:
    messages = [{"role": "user", "content": AS_JSON}]
    answer = client.chat(MODEL, messages, format=WEATHER, options={"temperature": 0, "num_ctx": 4096})
    assert json.loads(answer.message.content or "") == OBJECT


def generate() -> None:
    whole = client.generate(MODEL, GREETING, system="Be polite.", keep_alive="5m")
    parts = [*client.generate(MODEL, GREETING, stream=True)]
    assert whole.response == "".join(part.response or "" for part in parts) == HELLO
    assert whole.prompt_eval_count > parts[-1].prompt_eval_count
    cut = client.generate(MODEL, GREETING, options={"num_predict": 2, "top_k": 1, "stop": ["@"]})
    assert (cut.eval_count, cut.done_reason) == (2, "length")
    assert 0 < client.generate(MODEL, GREETING, raw=True).prompt_eval_count < cut.prompt_eval_count
    assert client.generate(MODEL).done_reason == "load"


def vectors() -> None:
    one, two = client.embed(MODEL, ["one", "two"]).embeddings
    assert one != two and client.embeddings(MODEL, "two").embedding == two


def lists() -> None:
    (model,), (loaded,) = client.list().models, client.ps().models
    assert model.model == loaded.model == MODEL and loaded.expires_at > model.modified_at
    assert "tools" in (client.show(MODEL).capabilities or ())


def refusals() -> None:
    for fields, says in (({"model": "x"}, "the model 'x' does not exist"), ({"options": {"mirostat": 1}}, "mirostat")):
        try:
            [*client.chat(**{"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True, **fields})]
        except ollama.ResponseError as error:
            assert says in error.error and error.status_code == (404 if "model" in fields else 400)
        else:
            raise AssertionError(fields)


def vs_code() -> None:
    """Copilot asks for these before it sends the chat to /v1/chat/completions, with the name from the list."""
    assert [int(part) for part in ask("/api/version")["version"].split(".")] >= [0, 6, 4]
    (model,) = ask("/api/tags")["models"]
    shown = ask("/api/show", {"model": model["model"]})
    info = shown["model_info"]
    assert info["general.basename"] and info[f"{info['general.architecture']}.context_length"] == 65536
    assert {"completion", "tools"} <= {*shown["capabilities"]}
    body = {"model": model["model"], "messages": [{"role": "user", "content": GREETING}]}
    assert ask("/v1/chat/completions", body)["choices"][0]["message"]["content"] == HELLO


def ask(path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(SERVER + path, data)) as response:
        return json.load(response)


report(
    [
        *(ollama_second_turn, ollama_tool_loop, ollama_stream, ollama_structured),
        *(generate, vectors, lists, refusals, vs_code),
    ],
    "ollama",
)
