"""Tools of a chat request: the constraint of a required call, and parsing of outputs to calls."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from quire.frontend.http.app import make_app
from quire.frontend.http.routes.tool_calls import AnyCalls, NamedCall
from quire.frontend.http.schema.tools import parse_tools
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.text.message_checks import check_messages
from quire.frontend.text.prompts import Prompt
from quire.frontend.text.thinking import Thinking
from quire.protocol.request.sampling_params import SamplingParams

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"$ref": "#/$defs/place"}, "self": {"$ref": "#"}},
            "$defs": {"place": {"type": "string"}},
        },
        "strict": True,
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
CALLS = [
    {"name": "weather", "parameters": {"place": 'a "b" \\ {[', "days": [1, {"x": None}]}},
    {"name": "clock", "parameters": {}},
]


def read_tools(tools: list[Any], tool_choice: Any, *, parallel_tool_calls: bool = True) -> Any:
    return parse_tools(tools, tool_choice, parallel=parallel_tool_calls)


def constraint(**fields: Any) -> Any:
    _, use = read_tools(**fields)
    assert use is not None
    assert isinstance(use.constraint.json, str)
    return json.loads(use.constraint.json)


class TestConstraint:
    @pytest.mark.parametrize("choice", [None, "auto", "none"])
    def test_free_choice_has_no_constraint(self, choice: Any) -> None:
        tools, use = read_tools([WEATHER], choice)
        assert use is None
        assert tools == (None if choice == "none" else [WEATHER])

    def test_no_tools(self) -> None:
        assert read_tools([], "auto") == (None, None)

    def test_named_function(self) -> None:
        schema = constraint(tools=[CLOCK, WEATHER], tool_choice=NAMED)
        assert schema == WEATHER["function"]["parameters"]  # type: ignore[index]

    def test_required(self) -> None:
        schema = constraint(tools=[WEATHER, CLOCK], tool_choice="required")
        assert (schema["type"], schema["minItems"]) == ("array", 1)
        assert "maxItems" not in schema
        first, second = schema["items"]["anyOf"]
        assert [s["properties"]["name"]["enum"] for s in (first, second)] == [["weather"], ["clock"]]
        assert list(first["properties"]) == first["required"] == ["name", "parameters"]
        # References of a tool's schema to itself are rewritten.
        place = schema["$defs"]["parameters_0"]
        assert first["properties"]["parameters"] == {"$ref": "#/$defs/parameters_0"}
        assert place["properties"]["place"] == {"$ref": "#/$defs/parameters_0/$defs/place"}
        assert place["properties"]["self"] == {"$ref": "#/$defs/parameters_0"}
        assert schema["$defs"]["parameters_1"]["additionalProperties"] is False

    def test_single_call_without_parallel_calls(self) -> None:
        assert constraint(tools=[CLOCK], tool_choice="required", parallel_tool_calls=False)["maxItems"] == 1


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
ANY_CALLS = st.lists(
    st.fixed_dictionaries(
        {"name": st.text(min_size=1, max_size=6), "parameters": st.dictionaries(st.text(max_size=4), VALUES)}
    ),
    max_size=3,
)


class TestParser:
    def test_name_of_a_named_call_precedes_its_text(self) -> None:
        call = NamedCall("f")
        deltas = [delta for part in ("", "{", "}", "") for delta in call.push(part)]
        assert [(d.name, d.arguments) for d in deltas] == [("f", ""), (None, "{"), (None, "}")]

    @given(data=st.data())
    @settings(max_examples=examples(60), deadline=None)
    def test_calls_split_anywhere(self, data: st.DataObject) -> None:
        calls = data.draw(ANY_CALLS)
        swapped = [dict(reversed(call.items())) if data.draw(st.booleans()) else call for call in calls]
        text = json.dumps(
            swapped, indent=data.draw(st.sampled_from([None, 0, 2])), ensure_ascii=data.draw(st.booleans())
        )
        sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
        names: list[str] = []
        arguments: list[str] = []
        parser, place, turn = AnyCalls(), 0, 0
        while place < len(text):
            size = sizes[turn % len(sizes)]
            for delta in parser.push(text[place : place + size]):
                if delta.name is not None:
                    names.append(delta.name)
                    arguments.append("")
                assert delta.index == len(names) - 1
                arguments[delta.index] += delta.arguments
            place, turn = place + size, turn + 1
        assert names == [call["name"] for call in calls]
        assert [json.loads(each) for each in arguments] == [call["parameters"] for call in calls]

    def test_arguments_are_streamed(self) -> None:
        parser = AnyCalls()
        assert parser.push('[{"name": "f"') == []
        (first,) = parser.push(', "parameters": {"a"')
        assert (first.name, first.arguments) == ("f", '{"a"')
        (more,) = parser.push(": 1")
        assert (more.name, more.arguments) == (None, ": 1")

    def test_state_does_not_grow_with_sent_arguments(self) -> None:
        parser = AnyCalls()
        parser.push('[{"name": "f", "parameters": {"a": "')
        for _ in range(1000):
            assert parser.push("x" * 100)[0].arguments == "x" * 100
        assert not parser._objects._arguments
        assert not parser._objects._token


class TestResponses:
    @pytest.fixture
    def ask(self, client: Any, engine: Any) -> Any:
        def ask(calls: Any, **fields: Any) -> Any:
            engine.reply = json.dumps(calls)
            return client.chat(tools=[WEATHER, CLOCK], **fields)

        engine.max_model_len = 2000
        return ask

    def test_named_function(self, ask: Any) -> None:
        choice = ask(CALLS[0]["parameters"], tool_choice=NAMED).json()["choices"][0]
        message = choice["message"]
        assert (message["content"], choice["finish_reason"]) == (None, "stop")
        (call,) = message["tool_calls"]
        assert (call["type"], call["function"]["name"]) == ("function", "weather")
        assert len(call["id"]) == 9 and call["id"].isalnum()
        assert json.loads(call["function"]["arguments"]) == CALLS[0]["parameters"]

    def test_required(self, ask: Any) -> None:
        choice = ask(CALLS, tool_choice="required").json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
        calls = choice["message"]["tool_calls"]
        assert [call["function"]["name"] for call in calls] == ["weather", "clock"]
        assert [json.loads(call["function"]["arguments"]) for call in calls] == [c["parameters"] for c in CALLS]
        assert len({call["id"] for call in calls}) == 2

    def test_required_call_beside_a_form_of_the_content(self, ask: Any, engine: Any) -> None:
        """instructor sends both. The content, whose form it is, is absent."""
        for choice in ("required", NAMED):
            assert ask(CALLS, tool_choice=choice).status_code == 200
            wanted = engine.added[-1].params.structured_outputs
            response_format = {"type": "json_object"}
            assert ask(CALLS, tool_choice=choice, response_format=response_format).status_code == 200
            assert engine.added[-1].params.structured_outputs == wanted

    def test_output_cut_off_by_max_tokens(self, ask: Any) -> None:
        choice = ask(CALLS, tool_choice="required", max_tokens=25).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        (call,) = choice["message"]["tool_calls"]
        assert json.dumps(CALLS[0]["parameters"]).startswith(call["function"]["arguments"])

    @pytest.mark.parametrize("per_update", [1, 3, 1000])
    @pytest.mark.parametrize("choice", [NAMED, "required"])
    def test_streamed(self, ask: Any, engine: Any, events: Any, choice: Any, per_update: int) -> None:
        engine.per_update = per_update
        required = choice == "required"
        got = events(ask(CALLS if required else CALLS[0]["parameters"], tool_choice=choice, stream=True, n=2))[:-1]
        for index in (0, 1):
            own = [event["choices"][0] for event in got if event["choices"][0]["index"] == index]
            assert own[0]["delta"]["role"] == "assistant"
            assert own[0]["delta"]["content"] is None
            assert own[-1]["finish_reason"] == ("tool_calls" if required else "stop")
            calls: list[Any] = []
            for delta in (d for each in own for d in each["delta"].get("tool_calls", [])):
                if delta["index"] == len(calls):
                    calls.append([delta["id"], delta["type"], delta["function"]["name"], ""])
                else:
                    assert set(delta) == {"index", "function"}
                    assert set(delta["function"]) == {"arguments"}
                calls[delta["index"]][3] += delta["function"]["arguments"]
            expected = CALLS if required else CALLS[:1]
            assert [call[2] for call in calls] == [call["name"] for call in expected]
            assert [json.loads(call[3]) for call in calls] == [call["parameters"] for call in expected]

    def test_output_of_a_free_choice_stays_text(self, ask: Any) -> None:
        message = ask(CALLS, tool_choice="auto").json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": json.dumps(CALLS), "refusal": None}

    def test_arguments_of_earlier_calls_become_objects(self) -> None:
        """Templates expect objects. Arguments that do not parse to an object stay text."""
        texts = ['{"a": [1]}', "", "[1]", "{", "7"]
        calls = [{"function": {"name": "f", "arguments": text}} for text in texts]
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        (checked, _) = check_messages([message, {"role": "user", "content": "x"}])
        found = [call["function"]["arguments"] for call in checked["tool_calls"]]
        assert found == [{"a": [1]}, {}, "[1]", "{", "7"]
        assert message["tool_calls"][0] == {"function": {"name": "f", "arguments": '{"a": [1]}'}}  # type: ignore[index]

    def test_tokenizing_a_conversation_with_tools(self, client: Any, engine: Any) -> None:
        engine.max_model_len = 2000
        messages = [{"role": "user", "content": "hello"}]
        for tools in (None, [CLOCK]):
            assert client.chat(messages=messages, tools=tools).status_code == 200
            tokens = client.post("/tokenize", {"messages": messages, "tools": tools}).json()["tokens"]
            assert tokens == engine.added[-1].prompt

    def test_template_receives_the_tools(self, ask: Any, engine: Any, tokenizer: Any) -> None:
        for choice in ("auto", "none", "required"):
            ask([], tool_choice=choice)
        has_tools = ['"description": "of a place"' in tokenizer.decode(s.prompt) for s in engine.added]
        assert has_tools == [True, False, True]


class TestThinkingBeforeACall:
    """Here ``<|im_start|>`` ends thinking: a special token, which the chat template writes unless ``bare`` is set."""

    @pytest.fixture
    def client(self, engine: Any, text_in: Any, client: Any) -> Any:
        thinking = Thinking((0,), (1,), "<|im_start|>", "<|endoftext|>")
        settings = ServerSettings(text_in=text_in, served_model_names=("tiny",), thinking=thinking)
        engine.max_model_len = 2000
        return type(client)(make_app(engine, settings))

    @pytest.mark.parametrize("per_update", [1, 4, 1000])
    @pytest.mark.parametrize("choice", [NAMED, "required"])
    def test_thinking_budget_implies_thinking(
        self, client: Any, engine: Any, events: Any, choice: Any, per_update: int
    ) -> None:
        text = json.dumps(CALLS if choice == "required" else CALLS[0]["parameters"])
        engine.reply, engine.per_update = "well, <|im_ 7" + "<|im_start|>" + text, per_update
        fields = {"tools": [WEATHER, CLOCK], "tool_choice": choice, "thinking_token_budget": 9, "stop": ["well"]}
        message = client.chat(**fields, chat_template_kwargs={"bare": True}).json()["choices"][0]["message"]
        assert message["reasoning_content"] == "well, <|im_ 7"
        assert message["content"] is None
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == CALLS[0]["parameters"]
        got = events(client.chat(**fields, stream=True, chat_template_kwargs={"bare": True}))[:-1]
        deltas = [event["choices"][0]["delta"] for event in got]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "well, <|im_ 7"
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        arguments = "".join(call["function"]["arguments"] for call in calls if call["index"] == 0)
        assert json.loads(arguments) == CALLS[0]["parameters"]

    def test_output_cut_off_while_thinking(self, client: Any, engine: Any) -> None:
        engine.reply = "hello world, how are you <|im_"
        fields = {"tools": [CLOCK], "tool_choice": "required", "thinking_token_budget": 9}
        choice = client.chat(**fields, chat_template_kwargs={"bare": True}).json()["choices"][0]
        assert choice["message"]["reasoning_content"] == engine.reply
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"

    def test_no_thinking_if_the_prompt_has_ended_it(self, client: Any, engine: Any) -> None:
        engine.reply = "{}"
        fields = {"tools": [WEATHER], "tool_choice": NAMED, "thinking_token_budget": 9}
        message = client.chat(**fields).json()["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["arguments"] == "{}"
        assert "reasoning_content" not in message

    def test_same_decision_as_the_engine(self) -> None:
        thinking = Thinking((5, 6), (7,), "x")
        with_budget = SamplingParams(thinking_token_budget=3)
        for prompt, plain, budget in (
            ([1, 2], "", "x"),
            ([5, 6, 1], "x", "x"),
            ([5, 6, 7, 1], "", ""),
            ([7, 5, 6], "x", "x"),
        ):
            whole = Prompt(np.array(prompt, np.int32))
            assert thinking.end_before_answer(whole, SamplingParams()) == plain
            assert thinking.end_before_answer(whole, with_budget) == budget
        assert Thinking().end_before_answer(Prompt(np.array([5, 6], np.int32)), with_budget) == ""
