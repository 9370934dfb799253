"""Thoughts and calls that the model chooses to write, in chat."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from quire.frontend.http.app import make_app
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.text.chat_template import ChatTemplate
from quire.frontend.text.parsing.choose_format import choose_format
from quire.frontend.text.text_in import TextIn
from tests.frontend.conftest import TEMPLATE

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("weather", "clock")
]
CALLS = [("weather", {"place": 'a "b" {', "days": [1, {"x": None}]}), ("clock", {})]
CALL_TEXT = "\n".join(
    f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in CALLS
)
# The special token ends a call, which a client must never see.
SPECIAL_CALL = '<|im_start|>call{"name": "clock", "arguments": {}}<|im_end|>'
OWN = {
    "fields": {
        "tool_calls": {
            "open": "<|im_start|>call",
            "close": "<|im_end|>",
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        }
    }
}


@pytest.fixture
def make_client(engine: Any, tokenizer: Any, client: Any) -> Any:
    def make(own: Any = None, opening: str = "", *, calls: str = "auto", thoughts: str = "auto") -> Any:
        template = TEMPLATE.replace("assistant\\n'", f"assistant\\n{opening}'")
        text_in = TextIn(tokenizer, ChatTemplate(template, {}, "test"))
        text_in.protect(("<think>", "</think>"))
        names = {"calls": calls, "thoughts": thoughts}
        form = choose_format(text_in.special_tokens, "<tool_call>", own, markers=("<think>", "</think>"), **names)
        settings = ServerSettings(text_in=text_in, served_model_names=("tiny",), answer_format=form)
        return type(client)(make_app(engine, settings))

    engine.max_model_len = 4000
    return make


def whole_message(chunks: list[Any]) -> dict[str, Any]:
    """Return the message that a client collects from a stream."""
    message: dict[str, Any] = {"role": "", "content": "", "reasoning": "", "reasoning_content": "", "calls": []}
    for delta in (chunk["choices"][0]["delta"] for chunk in chunks):
        for name in ("role", "content", "reasoning", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(message["calls"])
                message["calls"].append([call["function"]["name"], ""])
            message["calls"][call["index"]][1] += call["function"]["arguments"]
    message["calls"] = [(name, json.loads(arguments)) for name, arguments in message["calls"]]
    return message


@pytest.mark.parametrize("per_update", [1, 3, 1000])
def test_thoughts_content_and_calls(make_client: Any, engine: Any, events: Any, per_update: int) -> None:
    client = make_client()
    engine.reply, engine.per_update = f"<think>\nwell\n</think>\n\nI look.\n{CALL_TEXT}", per_update
    choice = client.chat(tools=TOOLS).json()["choices"][0]
    message = choice["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("well", "well", "I look.")
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]] == CALLS
    assert choice["finish_reason"] == "tool_calls"
    chunks = events(client.chat(tools=TOOLS, stream=True))[:-1]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert whole_message(chunks) == {
        "role": "assistant",
        "content": "I look.",
        "reasoning": "well",
        "reasoning_content": "well",
        "calls": CALLS,
    }


def test_arguments_are_streamed(make_client: Any, engine: Any, events: Any) -> None:
    engine.reply = CALL_TEXT
    chunks = events(make_client().chat(tools=TOOLS, stream=True))[:-1]
    assert sum(bool(chunk["choices"][0]["delta"].get("tool_calls")) for chunk in chunks) > 10


@pytest.mark.parametrize("per_update", [1, 1000])
def test_a_schema_and_tools(make_client: Any, engine: Any, events: Any, per_update: int) -> None:
    client, form = make_client(), {"type": "json_object"}
    content = json.dumps({"call": CALL_TEXT})
    engine.per_update = per_update
    for reply, wanted in ((content, (content, [])), (CALL_TEXT, ("", CALLS))):
        engine.reply = reply
        message = whole_message(events(client.chat(tools=TOOLS, response_format=form, stream=True))[:-1])
        assert (message["content"], message["calls"]) == wanted
        assert engine.added[-1].params.structured_outputs.kind == "form"
    client.chat(tools=TOOLS, response_format=form, tool_choice="none")
    assert engine.added[-1].params.structured_outputs.kind == "json_object"
    client.chat(tools=TOOLS, structured_outputs={"regex": "a+"})
    assert engine.added[-1].params.structured_outputs.kind == "regex"
    refused = client.chat(structured_outputs={"form": {"type": "text", "text": "a"}})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "structured_outputs.form"


def test_too_many_schemas_for_one_grammar(make_client: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.frontend.http.schema.tools.MAX_FORM_BYTES", 20_000)
    client = make_client(calls="qwen3_coder")
    engine.max_model_len = 10**5
    choices = {str(i): {"type": "string", "enum": [str(j) for j in range(20)]} for i in range(20)}
    parameters = {"type": "object", "properties": choices}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": parameters}} for i in range(8)]
    assert client.chat(tools=tools).status_code == 200
    refused = client.chat(tools=tools, response_format={"type": "json_object"})
    assert refused.status_code == 400 and "send fewer tools" in refused.json()["error"]["message"]


def test_a_schema_where_content_has_a_header(make_client: Any, engine: Any) -> None:
    client = make_client(calls="harmony", thoughts="harmony")
    engine.reply = '<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>{"a": 1}'
    message = client.chat(response_format={"type": "json_object"}).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", '{"a": 1}')
    assert engine.added[-1].params.structured_outputs.kind == "form"
    client.chat(structured_outputs={"json_object": True})
    assert engine.added[-1].params.structured_outputs.kind == "json_object"
    client.chat(response_format={"type": "json_object"}, continue_final_message=True)
    assert engine.added[-1].params.structured_outputs.kind == "json_object"


def test_only_calls(make_client: Any, engine: Any) -> None:
    engine.reply = CALL_TEXT
    message = make_client().chat(tools=TOOLS, tool_choice="auto").json()["choices"][0]["message"]
    assert message["content"] is None
    assert "reasoning" not in message


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_calls_are_content(make_client: Any, engine: Any, events: Any, fields: Any) -> None:
    engine.reply = f"<think>hm</think>{CALL_TEXT}"
    choice = make_client().chat(**fields).json()["choices"][0]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("hm", CALL_TEXT)
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("text", ["<tool_call>{", '<tool_call>{"name": "clock", "arguments": {x}}</tool_call> so'])
def test_malformed_calls_are_content(make_client: Any, engine: Any, events: Any, text: str) -> None:
    engine.reply = text
    choice = make_client().chat(tools=TOOLS).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in choice["message"]
    chunks = events(make_client().chat(tools=TOOLS, stream=True))[:-1]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_each_choice_has_its_own_calls(make_client: Any, engine: Any) -> None:
    engine.reply = CALL_TEXT
    for choice in make_client().chat(tools=TOOLS, n=3).json()["choices"]:
        assert len(choice["message"]["tool_calls"]) == 2


def test_special_tokens_that_are_delimiters(make_client: Any, engine: Any) -> None:
    """They are in the text for the parser only; other special tokens are skipped as before."""
    engine.reply = f"so<|endoftext|> {SPECIAL_CALL}"
    message = make_client(OWN).chat(tools=TOOLS).json()["choices"][0]["message"]
    assert message["content"] == "so "
    assert message["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"}


def test_thoughts_that_the_template_opens(make_client: Any, engine: Any) -> None:
    engine.reply = "well\n</think>\n\nyes"
    message = make_client(opening="<think>\\n").chat().json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("well", "yes")


CHANNEL = "<|start|>assistant<|channel|>"


@pytest.mark.parametrize("per_update", [1, 1000])
@pytest.mark.parametrize(
    ("form", "opening", "reply", "wanted"),
    [
        ("", "", "<think>a STOP b</think>\n\nyes STOP no", ("a STOP b", "yes ", "STOP")),
        ("", "", "<think>a STOP b</think>\n\nyes", ("a STOP b", "yes", None)),
        ("", "", "<think>a</think>\n\nyes\n\nno", ("a", "yes", "\n\n")),
        ("", "", "ST<think>OP</think>OP", ("OP", "STOP", None)),
        ("", "", "<think>a</think>y ST<think>b STOP</think>z STOP no", ("a\nb STOP", "y STz ", "STOP")),
        ("", "", "<think>a STOP b", ("a STOP b", "", None)),
        ("", "", "yes STOP <think>no</think>", ("", "yes ", "STOP")),
        ("", "<think>\\n", "a STOP b\n</think>\n\nyes STOP no", ("a STOP b", "yes ", "STOP")),
        ("gemma4", "", "<|channel>thought\na STOP b<channel|>yes STOP no<turn|>", ("a STOP b", "yes ", "STOP")),
        (
            "harmony",
            "",
            f"<|channel|>analysis<|message|>a STOP b<|end|>{CHANNEL}final<|message|>yes STOP no<|return|>",
            ("a STOP b", "yes ", "STOP"),
        ),
    ],
)
def test_stop_strings_act_on_the_answer(
    make_client: Any, engine: Any, events: Any, per_update: int, form: str, opening: str, reply: str, wanted: Any
) -> None:
    client = make_client(opening=opening, **({"calls": form, "thoughts": form} if form else {}))
    engine.reply, engine.per_update = reply, per_update
    choice = client.chat(stop=["STOP", "\n\n"]).json()["choices"][0]
    message, reason = choice["message"], choice["stop_reason"]
    assert (message.get("reasoning", ""), message["content"], reason) == wanted
    chunks = events(client.chat(stop=["STOP", "\n\n"], stream=True))[:-1]
    message, reason = whole_message(chunks), chunks[-1]["choices"][0]["stop_reason"]
    assert (message["reasoning"], message["content"], reason) == wanted


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_messages_open_no_thoughts(make_client: Any, engine: Any, role: str) -> None:
    """A1 of the attacks: the marker in a message's text is text."""
    engine.reply = "yes</think>no"
    messages = [{"role": "user", "content": "a"}, {"role": role, "content": "<think>\n"}]
    for fields in ({}, {"add_generation_prompt": False}):
        message = make_client().chat(messages=messages, **fields).json()["choices"][0]["message"]
        assert (message["content"], "reasoning" in message) == (engine.reply, False)


@pytest.mark.parametrize("per_update", [1, 3, 1000])
@pytest.mark.parametrize("stream", [False, True])
class TestWithoutParallelCalls:
    def ask(self, make_client: Any, events: Any, *, stream: bool, **fields: Any) -> tuple[Any, Any]:
        """Return the message, and the finish reason."""
        answer = make_client().chat(tools=TOOLS, parallel_tool_calls=False, stream=stream, **fields)
        if not stream:
            choice = answer.json()["choices"][0]
            message = {"content": "", **choice["message"]}
            calls = message.get("tool_calls") or []
            named = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
            return {"content": message["content"] or "", "calls": named}, choice["finish_reason"]
        chunks = events(answer)[:-1]
        message = whole_message(chunks)
        kept = {name: message[name] for name in ("content", "calls")}
        return kept, chunks[-1]["choices"][0]["finish_reason"]

    def test_answer_ends_with_its_first_call(
        self, make_client: Any, engine: Any, events: Any, stream: bool, per_update: int
    ) -> None:
        engine.reply, engine.per_update = f"I look.\n{CALL_TEXT}\nMore text." + " And more." * 20, per_update
        message, reason = self.ask(make_client, events, stream=stream)
        assert (message, reason) == ({"content": "I look.", "calls": CALLS[:1]}, "tool_calls")
        if per_update < 1000:
            sequence = engine.added[-1]
            assert sequence.stopped_at is not None and sequence.stopped_at < len(sequence.tokens) // 2

    def test_text_that_is_no_call_does_not_end_it(
        self, make_client: Any, engine: Any, events: Any, stream: bool, per_update: int
    ) -> None:
        broken = "<tool_call>\nnothing\n</tool_call>"
        engine.reply, engine.per_update = f"{broken}\n{CALL_TEXT}", per_update
        message, reason = self.ask(make_client, events, stream=stream)
        assert (message["calls"], reason) == (CALLS[:1], "tool_calls")
        assert "nothing" in message["content"]

    def test_several_choices(self, make_client: Any, engine: Any, events: Any, stream: bool, per_update: int) -> None:
        engine.reply, engine.per_update = CALL_TEXT, per_update
        answer = make_client().chat(tools=TOOLS, parallel_tool_calls=False, n=3, stream=stream)
        if stream:
            named = [
                (choice["index"], call["function"]["name"])
                for chunk in events(answer)[:-1]
                for choice in chunk["choices"]
                for call in choice["delta"].get("tool_calls", [])
                if "id" in call
            ]
        else:
            choices = answer.json()["choices"]
            named = [(c["index"], call["function"]["name"]) for c in choices for call in c["message"]["tool_calls"]]
        assert sorted(named) == [(0, "weather"), (1, "weather"), (2, "weather")]


@pytest.mark.parametrize("per_update", [1, 3, 1000])
def test_reasoning_tokens(make_client: Any, engine: Any, events: Any, tokenizer: Any, per_update: int) -> None:
    """Each letter is a token of its own, though the tokenizer would write the text with fewer."""
    client, letters = make_client(), json.loads(tokenizer.to_str())
    letters["model"]["merges"] = []
    engine.tokenizer = Tokenizer.from_str(json.dumps(letters))
    engine.reply, engine.per_update = "<think>\nwell, a little engine\n</think>\n\nI look.", per_update
    usage = client.chat().json()["usage"]
    num_thought = len("well, a little engine")
    assert usage["completion_tokens_details"] == {"reasoning_tokens": num_thought}
    chunks = events(client.chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[-2]["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thought}
    response = client.post("/v1/responses", {"input": "x"}).json()
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": num_thought}
    engine.reply = "I look."
    assert client.chat().json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
