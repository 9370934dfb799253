"""Ollama's API over a fake engine."""

import json
from typing import Any

import pytest
from pooled_vectors import BOTH, embedding_of

from quire.frontend.http.app import make_app
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.text.chat_template import ChatTemplate
from quire.frontend.text.parsing.choose_format import choose_format
from quire.frontend.text.pooling.capabilities import Capabilities
from quire.frontend.text.text_in import TextIn
from quire.protocol.errors import EngineError
from tests.frontend.http.test_dialect_answers import ANSWER, BROKEN, SAID

HELLO = {"role": "user", "content": "hello"}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name, _ in SAID]
TEMPLATE = (
    "{{ thinking }}|{{ reasoning_effort }}"
    "{% for m in messages %}|{{ m.role }} {{ m.content }} {{ m.reasoning }} {{ m.name }} {{ m.tool_call_id }}"
    "{% for c in m.tool_calls %} {{ c.id }} {{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


@pytest.fixture
def make(client: Any, engine: Any, text_in: Any) -> Any:
    engine.max_model_len = 2000

    def made(**settings: Any) -> Any:
        form = choose_format(text_in.special_tokens, "<tool_call>", None, markers=("<think>", "</think>"))
        fields = {"text_in": text_in, "served_model_names": ("tiny", "big:70b"), "answer_format": form, **settings}
        return type(client)(make_app(engine, ServerSettings(**fields, architecture="Qwen3MoeForCausalLM")))

    return made


@pytest.fixture
def ask(make: Any) -> Any:
    return lambda path="chat", **fields: make().post(
        f"/api/{path}", {**({"messages": [HELLO]} if path == "chat" else {"prompt": "hello"}), **fields}
    )


@pytest.fixture
def rendered(make: Any, engine: Any, text_in: Any) -> Any:
    """Return the prompt of a body of /api/chat."""

    def render(**fields: Any) -> str:
        given = TextIn(text_in.tokenizer, ChatTemplate(TEMPLATE, {}, "test"))
        assert make(text_in=given).post("/api/chat", {"messages": [HELLO], **fields}).status_code == 200
        return str(text_in.decode(engine.added[-1].prompt))

    return render


def lines(response: Any) -> list[Any]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def whole(response: Any, stream: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the message that a client makes of an answer, and its last object."""
    objects = lines(response) if stream else [response.json()]
    assert [each["done"] for each in objects] == [False] * (len(objects) - 1) + [True]
    message: dict[str, Any] = {}
    for part in (each["message"] for each in objects):
        assert part.pop("role") == "assistant"
        for name, value in part.items():
            message[name] = message[name] + value if name in message else value
    return message, objects[-1]


class TestAnswers:
    @pytest.mark.parametrize("per_update", [1, 3, 1000])
    @pytest.mark.parametrize("stream", [False, True])
    def test_thoughts_text_and_calls(self, ask: Any, engine: Any, stream: bool, per_update: int) -> None:
        engine.reply, engine.per_update = ANSWER.replace('{"place"', '{\n"place"'), per_update
        message, last = whole(ask(tools=TOOLS, stream=stream), stream)
        assert (message["thinking"], message["content"]) == ("well", "I look.")
        functions = [call["function"] for call in message["tool_calls"]]
        assert [(each["name"], each["arguments"]) for each in functions] == SAID
        assert [each["index"] for each in functions] == [0, 1, 2]
        assert (last["done_reason"], last["prompt_eval_count"]) == ("stop", len(engine.added[-1].prompt))
        assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"] - 1 and last["eval_count"]

    @pytest.mark.parametrize("stream", [False, True])
    def test_what_is_no_whole_call_is_text(self, ask: Any, engine: Any, stream: bool) -> None:
        engine.reply = BROKEN
        message, _ = whole(ask(tools=TOOLS, stream=stream), stream)
        assert "Rome}}" in message["content"] and "tool_calls" not in message
        engine.reply = json.dumps([{"name": "patch", "parameters": {"input": "abcdef"}}])
        fields = {"tool_choice": "required", "options": {"num_predict": 40}}
        message, last = whole(ask(tools=TOOLS, stream=stream, **fields), stream)
        assert message["content"].startswith('{"input') and "tool_calls" not in message
        assert last["done_reason"] == "length"

    def test_generate(self, ask: Any, engine: Any, text_in: Any) -> None:
        objects = lines(ask("generate", model="tiny:latest", system="be brief"))
        assert "".join(each["response"] for each in objects) == "one two three four five"
        assert {each["model"] for each in objects} == {"tiny:latest"}
        prompt = text_in.decode(engine.added[-1].prompt, skip_special_tokens=False)
        assert prompt.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello")
        response = ask("generate", raw=True, think=False, stream=False, logprobs=True, top_logprobs=1)
        answer = response.json()
        assert "x-quire-ignored-fields" not in response.headers
        assert text_in.decode(engine.added[-1].prompt) == "hello" and engine.added[-1].params.max_tokens > 1000
        assert [entry["token"] for entry in answer["logprobs"]] == ["one", " two", " three", " four", " five"]

    @pytest.mark.parametrize("fields", [{"messages": []}, {"model": "big:70b", "messages": [], "keep_alive": 0}])
    def test_nothing_to_answer(self, ask: Any, engine: Any, fields: Any) -> None:
        answer = ask(**fields).json()
        assert (answer["message"]["content"], answer["done_reason"], engine.added) == ("", "load", [])

    def test_error_in_a_stream(self, ask: Any, engine: Any) -> None:
        engine.ending = EngineError("gone")
        assert lines(ask())[-1] == {"error": "engine not available"}


class TestRequests:
    def test_options(self, ask: Any, engine: Any) -> None:
        options = {"temperature": 0.5, "top_k": 5, "min_p": 0.1, "seed": 3, "stop": ["three"], "num_predict": 10**6}
        more = {"repeat_penalty": 1.25, "repeat_last_n": -1, "num_ctx": 64, "typical_p": 1, "made_up": 1}
        response = ask(options=options | more, format="json", think=False, stream=False)
        assert response.json()["message"]["content"] == "one two "
        assert response.headers["x-quire-ignored-fields"] == "options.num_ctx,options.made_up"
        params = engine.added[-1].params
        assert (params.temperature, params.top_k, params.min_p) == (0.5, 5, 0.1)
        assert (params.repetition_penalty, params.structured_outputs.json_object) == (1.25, True)
        assert 1900 < params.max_tokens < 2000
        for seed in (3, -1, -1):
            ask(format={"type": "integer"}, options={"seed": seed, "num_predict": -1})
        assert engine.added[0].seed == engine.added[1].seed and len({each.seed for each in engine.added}) == 3
        assert json.loads(engine.added[-1].params.structured_outputs.json) == {"type": "integer"}

    def test_thinking(self, rendered: Any) -> None:
        assert [rendered(think=value)[:9] for value in (True, "high")] == ["True||use", "True|high"]

    def test_calls_and_results_get_ids(self, rendered: Any) -> None:
        calls = [{"function": {"name": name, "arguments": {"n": i}}} for i, name in enumerate(("a", "b", "a"))]
        messages = [
            HELLO,
            {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [*calls, {"id": "x", **calls[0]}]},
            *({"role": "tool", "content": "r", **name} for name in ({"tool_name": "b"}, {}, {"tool_call_id": "x"})),
            {"role": "assistant", "content": "go"},
        ]
        _, _, _, answer, *results, last = rendered(messages=messages).split("|")
        ids = answer.removeprefix("assistant  hm   ").split("} ")
        assert [each.split()[0] for each in ids] == ["call00000", "call00001", "call00002", "x"]
        assert [result.split()[2:] for result in results] == [["b", "call00001"], ["a", "call00000"], ["a", "x"]]
        assert last == "assistant go"

    @pytest.mark.parametrize(
        ("path", "fields", "says"),
        [
            ("chat", {"options": {"temperature": 9}}, "options.temperature must be a number from 0 to 2 (got 9)"),
            ("chat", {"options": {"repeat_penalty": 0}}, "options.repeat_penalty must be a number from 0.01 to 10"),
            ("chat", {"options": {"num_predict": 0}}, "options.num_predict must be at least 1, or -1 for no limit"),
            ("chat", {"options": {"num_predict": "x"}}, "options.num_predict must be an integer from -2 to"),
            ("chat", {"options": {"mirostat": 2}}, "options.mirostat is not supported: use temperature"),
            ("chat", {"options": {"presence_penalty": 1, "repeat_last_n": 64}}, "options.repeat_last_n must be -1"),
            ("chat", {"options": {"n": 2}}, "options.n is not supported"),
            ("chat", {"n": 2}, "n is not supported"),
            ("chat", {"use_beam_search": True}, "use_beam_search is not supported"),
            ("chat", {"format": "xml"}, "format must be \"json\" or an object with a JSON schema (got 'xml')"),
            ("chat", {"think": "deeply"}, "think must be true, false or one of low, medium, high, max (got 'deeply')"),
            ("chat", {"messages": ["x"]}, "messages[0] must be an object (got 'x')"),
            ("chat", {"messages": [{"role": "tool", "content": 1}]}, "messages[0].content must be a string (got 1)"),
            ("chat", {"messages": [{**HELLO, "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function must be an"),
            ("chat", {"messages": [{**HELLO, "images": ["a"]}]}, "messages[0].images[0].type must be text"),
            ("chat", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name must be"),
            ("generate", {"suffix": "x"}, "suffix is not supported"),
            ("generate", {"template": "x"}, "template is not supported: start the server with --chat-template"),
            ("generate", {"context": [1]}, "context is not supported: write it into messages"),
            ("generate", {"raw": True, "system": "x"}, "system cannot be combined with raw: write it into prompt"),
            ("generate", {"raw": True, "options": {"top_p": 2}}, "options.top_p must be a number"),
            ("embed", {"input": "x"}, "/api/embed needs a model that makes vectors"),
        ],
    )  # fmt: skip
    def test_refusals(self, ask: Any, path: str, fields: Any, says: str) -> None:
        response = ask(path, **fields)
        assert response.status_code == 400 and [*response.json()] == ["error"]
        assert response.json()["error"].startswith(says)


class TestLists:
    def test_models(self, make: Any) -> None:
        client = make(capabilities=Capabilities(True, BOTH))
        models = client.get("/api/tags").json()["models"]
        assert [model["name"] for model in models] == [model["model"] for model in models] == ["tiny", "big:70b"]
        assert [model["name"] for model in client.get("/api/ps").json()["models"]] == ["tiny", "big:70b"]
        shown = client.post("/api/show", {"model": "tiny:latest", "verbose": True}).json()
        assert shown["model_info"]["general.architecture"] == shown["details"]["family"] == "qwen3moe"
        assert shown["model_info"]["qwen3moe.context_length"] == 2000
        assert shown["capabilities"] == ["completion", "tools", "thinking", "embedding"]

    def test_unknown_models_and_paths(self, ask: Any) -> None:
        for path, fields in (("chat", {"model": "big"}), ("show", {"name": "x"}), ("pull", {"model": "tiny"})):
            response = ask(path, **fields)
            assert response.status_code == 404 and isinstance(response.json()["error"], str)


class TestVectors:
    def test_embed(self, make: Any, text_in: Any) -> None:
        client = make(capabilities=Capabilities(True, BOTH))
        answer = client.post("/api/embed", {"model": "tiny:latest", "input": ["hello", "world" * 2000]}).json()
        first, long = answer["embeddings"]
        assert first == embedding_of(text_in.encode("hello")).tolist() and len(long) == len(first)
        assert answer["model"] == "tiny:latest" and answer["prompt_eval_count"] > 2000
        assert client.post("/api/embeddings", {"prompt": "hello"}).json() == {"embedding": first}
        assert client.post("/api/embed", {"input": []}).json()["embeddings"] == []
        refused = client.post("/api/embeddings", {"prompt": "world" * 2000, "truncate": False})
        assert refused.status_code == 400 and "2000" in refused.json()["error"]
