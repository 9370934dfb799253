"""Completions and chat completions through the whole application, with an engine that invents tokens."""

import asyncio
import json
from typing import Any

import pytest
from starlette.applications import Starlette

from quire.frontend.http.app import make_app
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.text.text_in import TextIn
from quire.protocol.errors import EngineError, InvalidRequest
from quire.protocol.request.sampling_params import seed_for_sample
from quire.protocol.wire.front_end_messages import EndReason

REPLY = "one two three four five"


class TestCompletions:
    def test_plain(self, client: Any, engine: Any, tokenizer: Any) -> None:
        response = client.complete(max_tokens=50)
        assert response.status_code == 200
        body = response.json()
        assert body["id"].startswith("cmpl-")
        assert body["id"] == response.headers["x-request-id"]
        assert (body["object"], body["model"]) == ("text_completion", "tiny")
        num_output = len(tokenizer.encode(REPLY).ids) + 1
        num_prompt = len(tokenizer.encode("hello").ids)
        assert body["choices"] == [
            {"index": 0, "text": REPLY, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ]
        assert body["usage"] == {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": num_prompt // 2},
        }
        assert not engine.added[0].aborted

    def test_streamed_text_equals_plain_text(self, client: Any, events: Any) -> None:
        got = events(client.complete(max_tokens=50, stream=True))
        assert got.pop() == "[DONE]"
        assert "".join(event["choices"][0]["text"] for event in got) == REPLY
        assert [event["choices"][0]["finish_reason"] for event in got] == [None] * (len(got) - 1) + ["stop"]
        assert len({event["id"] for event in got}) == 1
        assert all("usage" not in event for event in got)

    def test_usage_in_a_stream(self, client: Any, events: Any) -> None:
        whole = client.complete(max_tokens=50).json()["usage"]
        got = events(client.complete(max_tokens=50, stream=True, stream_options={"include_usage": True}))
        assert got[-1] == "[DONE]"
        assert (got[-2]["choices"], got[-2]["usage"]) == ([], whole)
        assert all(event["usage"] is None for event in got[:-2])
        options = {"include_usage": True, "continuous_usage_stats": True}
        got = events(client.complete(max_tokens=50, stream=True, stream_options=options))
        assert [event["usage"]["completion_tokens"] for event in got[:3]] == [1, 2, 3]

    def test_defaults(self, client: Any, engine: Any) -> None:
        engine.reply = None
        assert client.complete().json()["choices"][0]["finish_reason"] == "length"
        assert engine.added[0].params.max_tokens == 16
        assert engine.priorities == [(0, "")]
        client.complete(prompt=[3] * 250)
        assert engine.added[1].params.max_tokens == 6

    def test_sampling_fields_reach_the_engine(self, client: Any, engine: Any) -> None:
        fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "ignore_eos": True, "stop_token_ids": [9]}
        assert client.complete(**fields, priority=-3, cache_salt="mine", max_tokens=5).status_code == 200
        params = engine.added[0].params
        assert {name: getattr(params, name) for name in fields} == fields
        assert engine.priorities == [(-3, "mine")]

    def test_several_prompts_and_choices(self, client: Any, engine: Any, tokenizer: Any) -> None:
        engine.reply = None
        body = client.complete(prompt=["hello", "one two"], n=3, seed=11, max_tokens=4).json()
        assert [choice["index"] for choice in body["choices"]] == list(range(6))
        assert [s.seed for s in engine.added] == [seed_for_sample(11, i) for i in range(3)] * 2
        assert body["usage"]["completion_tokens"] == 24
        assert body["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(p).ids) for p in ("hello", "one two"))

    @pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
    def test_token_ids(self, client: Any, engine: Any, prompt: Any) -> None:
        assert client.complete(prompt=prompt).status_code == 200
        assert engine.added[0].prompt == [5, 6, 7]

    def test_same_seed_repeats_text_and_no_seed_does_not(self, client: Any, engine: Any) -> None:
        engine.reply = None
        texts = [client.complete(seed=seed).json()["choices"][0]["text"] for seed in (1, 1, 2, None, None)]
        assert texts[0] == texts[1]
        assert len(set(texts)) == 4

    def test_echo(self, client: Any, events: Any) -> None:
        assert client.complete(echo=True, max_tokens=50).json()["choices"][0]["text"] == "hello" + REPLY
        ids = client.post("/tokenize", {"prompt": "hello"}).json()["tokens"]
        got = events(client.complete(prompt=ids, echo=True, max_tokens=50, stream=True))
        assert "".join(event["choices"][0]["text"] for event in got[:-1]) == "hello" + REPLY

    def test_logprobs(self, client: Any) -> None:
        logprobs = client.complete(logprobs=3, max_tokens=50).json()["choices"][0]["logprobs"]
        assert "".join(logprobs["tokens"]) == REPLY + "<|im_end|>"
        assert logprobs["token_logprobs"] == [-0.5] * len(logprobs["tokens"])
        for token, offset in zip(logprobs["tokens"][:-1], logprobs["text_offset"], strict=False):
            assert REPLY[offset:].startswith(token)
        assert logprobs["text_offset"][-1] == len(REPLY)
        assert logprobs["top_logprobs"][0] == {logprobs["tokens"][0]: -0.5, "#": -2.0, "$": -9999.0}

    def test_streamed_logprobs_equal_plain_logprobs(self, client: Any, events: Any) -> None:
        whole = client.complete(logprobs=1, max_tokens=50).json()["choices"][0]["logprobs"]
        parts = [
            event["choices"][0]["logprobs"]
            for event in events(client.complete(logprobs=1, max_tokens=50, stream=True))[:-1]
        ]
        for name, values in whole.items():
            assert [value for part in parts for value in part[name]] == values


class TestStop:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("per_update", [1, 2, 100])
    @pytest.mark.parametrize(("include", "text"), [(False, "one two thr"), (True, "one two three fo")])
    def test_stop_string_ends_the_text_and_the_sequence(
        self, client: Any, engine: Any, events: Any, stream: bool, per_update: int, include: bool, text: str
    ) -> None:
        engine.per_update = per_update
        fields = {"stop": ["ee fo"], "include_stop_str_in_output": include, "max_tokens": 50, "logprobs": 0}
        response = client.complete(**fields, stream=stream)
        if stream:
            choices = [event["choices"][0] for event in events(response)[:-1]]
            got = "".join(choice["text"] for choice in choices)
            num_tokens = sum(len(choice["logprobs"]["tokens"]) for choice in choices)
        else:
            choices = response.json()["choices"]
            got = choices[0]["text"]
            num_tokens = response.json()["usage"]["completion_tokens"]
            assert len(choices[0]["logprobs"]["tokens"]) == num_tokens
        assert got == text
        assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "ee fo")
        # Reported to the engine, unless the engine has ended the sequence in the same update.
        assert engine.added[0].stopped_at == (None if per_update == 100 else num_tokens)
        assert not engine.added[0].aborted

    def test_stop_of_one_choice_does_not_affect_the_other(self, client: Any, engine: Any) -> None:
        engine.reply = None
        body = client.complete(n=2, seed=4, max_tokens=30).json()
        first, second = (choice["text"] for choice in body["choices"])
        stop = next(first[i : i + 3] for i in range(5, 15) if first[i : i + 3] not in second)
        again = client.complete(n=2, seed=4, max_tokens=30, stop=stop).json()["choices"]
        assert [choice["finish_reason"] for choice in again] == ["stop", "length"]
        assert again[1]["text"] == second

    def test_stop_token_has_no_text(self, client: Any, engine: Any, tokenizer: Any) -> None:
        engine.reply = "hello"
        fields = {"max_tokens": 50, "skip_special_tokens": False}
        assert client.complete(**fields).json()["choices"][0]["text"] == "hello"
        included = client.complete(**fields, include_stop_str_in_output=True)
        assert included.json()["choices"][0]["text"] == "hello<|im_end|>"


class TestChat:
    def test_plain(self, client: Any, engine: Any, tokenizer: Any) -> None:
        body = client.chat().json()
        assert body["id"].startswith("chatcmpl-")
        assert body["object"] == "chat.completion"
        message = {"role": "assistant", "content": REPLY, "refusal": None}
        assert body["choices"] == [
            {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ]
        prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(engine.added[0].prompt, skip_special_tokens=False) == prompt
        assert engine.added[0].params.max_tokens == 256 - len(engine.added[0].prompt)

    def test_streamed(self, client: Any, events: Any) -> None:
        got = events(client.chat(stream=True, stream_options={"include_usage": True}))
        assert got.pop() == "[DONE]"
        usage = got.pop()
        assert (usage["choices"], usage["object"]) == ([], "chat.completion.chunk")
        deltas = [event["choices"][0]["delta"] for event in got]
        assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        assert "".join(delta["content"] for delta in deltas) == REPLY

    def test_several_streamed_choices(self, client: Any, engine: Any, events: Any) -> None:
        engine.reply = None
        whole = [choice["message"]["content"] for choice in client.chat(n=3, seed=5, max_tokens=20).json()["choices"]]
        texts, roles = ["", "", ""], [0, 0, 0]
        for event in events(client.chat(n=3, seed=5, max_tokens=20, stream=True))[:-1]:
            choice = event["choices"][0]
            texts[choice["index"]] += choice["delta"]["content"]
            roles[choice["index"]] += "role" in choice["delta"]
        assert texts == whole
        assert roles == [1, 1, 1]

    def test_logprobs(self, client: Any) -> None:
        content = client.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
        assert bytes(byte for token in content for byte in token["bytes"]).decode() == REPLY
        assert [len(token["top_logprobs"]) for token in content] == [2] * len(content)
        assert client.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []

    @pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
    def test_both_names_of_max_tokens(self, client: Any, engine: Any, name: str) -> None:
        assert client.chat(**{name: 3}).json()["choices"][0]["finish_reason"] == "length"
        assert engine.added[0].params.max_tokens == 3

    def test_text_parts_and_tool_messages(self, client: Any, engine: Any, tokenizer: Any) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages = [
            {"role": "user", "content": parts, "name": "me"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "c", "tool_call_id": "1"},
        ]
        assert client.chat(messages=messages).status_code == 200
        assert "user\na\nb<|im_end|>" in tokenizer.decode(engine.added[0].prompt, skip_special_tokens=False)

    def test_continue_final_message(self, client: Any, engine: Any, tokenizer: Any) -> None:
        messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "well"}]
        assert client.chat(messages=messages, continue_final_message=True).status_code == 200
        assert tokenizer.decode(engine.added[0].prompt).endswith("assistant\nwell")

    def test_template_that_raises(self, client: Any) -> None:
        error = client.chat(messages=[{"role": "tool", "content": "x"}]).json()["error"]
        assert error["message"] == "the model's chat template refuses these messages: a tool cannot begin"
        assert error["param"] == "messages"


class TestFailures:
    @pytest.mark.parametrize("stream", [False, True])
    def test_scheduler_refusal_is_a_400(self, client: Any, engine: Any, stream: bool) -> None:
        """At submission or before the first token: no event may have been sent before the refusal."""
        refusal = InvalidRequest("prompt needs more blocks than there are", "prompt", "prompt_too_large")
        for engine.refuse, engine.ending in ((refusal, EndReason.STOPPED), (None, refusal)):
            response = client.complete(stream=stream, n=2)
            assert response.status_code == 400
            assert response.json()["error"] == {
                "message": "prompt needs more blocks than there are",
                "type": "invalid_request_error",
                "param": "prompt",
                "code": "prompt_too_large",
            }

    @pytest.mark.parametrize("stream", [False, True])
    def test_failed_engine_is_a_503(self, client: Any, engine: Any, stream: bool) -> None:
        engine.refuse = EngineError("connection to /tmp/secret lost")
        response = client.complete(stream=stream)
        assert response.status_code == 503
        assert "secret" not in response.text

    @pytest.mark.parametrize("ending", [EngineError("at 0x7f00"), EndReason.ERROR, RuntimeError("at 0x7f00")])
    def test_error_within_a_stream_is_an_event(
        self, client: Any, engine: Any, events: Any, ending: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine.ending = ending
        got = events(client.complete(stream=True, max_tokens=50, n=2, seed=1))
        assert got[0]["choices"][0]["text"]
        assert set(got[-1]) == {"error"}
        assert "0x7f" not in got[-1]["error"]["message"]
        assert ("unexpected error" in caplog.text) == isinstance(ending, RuntimeError)
        assert any(sequence.aborted for sequence in engine.added)

    def test_error_in_a_plain_response(self, client: Any, engine: Any) -> None:
        engine.ending = EndReason.ERROR
        response = client.complete(max_tokens=50)
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "the worker failed twice on this request"

    def test_unexpected_exception_is_logged_and_not_revealed(
        self, client: Any, engine: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine.ending = RuntimeError("secret at 0x7f00")
        response = client.complete(max_tokens=50)
        assert response.status_code == 500
        assert response.json()["error"] == {
            "message": "internal error",
            "type": "internal_error",
            "param": None,
            "code": "internal_error",
        }
        assert "secret at 0x7f00" in caplog.text

    @pytest.mark.parametrize("state", ["loading", "draining", "failed"])
    def test_requests_are_refused_while_not_serving(self, client: Any, engine: Any, state: str) -> None:
        engine.state = state
        for response in (client.complete(), client.chat()):
            assert response.status_code == 503
            assert response.json()["error"]["message"] == f"engine not available (state: {state})"


class TestDisconnect:
    @pytest.mark.parametrize("n", [1, 3])
    @pytest.mark.parametrize("hang_after", [0, 2])
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    def test_disconnect_aborts_sequences(
        self, engine: Any, connect: Any, finish: Any, path: str, stream: bool, hang_after: int, n: int
    ) -> None:
        engine.hang_after = hang_after
        text = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
        connection = connect(path, {**text, "stream": stream, "n": n})

        async def scenario() -> None:
            request = asyncio.create_task(connection.run())
            while len(engine.added) < n:
                await asyncio.sleep(0)
            for sequence in engine.added:
                await sequence.waiting.wait()
            assert not any(sequence.aborted for sequence in engine.added)
            connection.gone.set()
            await request

        finish(scenario())
        assert [sequence.aborted for sequence in engine.added] == [True] * n
        started = [message for message in connection.sent if message["type"] == "http.response.start"]
        assert len(started) == (1 if stream and hang_after else 0)

    def test_disconnect_within_the_body(self, app: Starlette, engine: Any, finish: Any) -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            raise AssertionError("the client has disconnected")

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "headers": [],
            "query_string": b"",
            "scheme": "http",
            "server": ("test", 80),
        }
        finish(app(scope, receive, send))
        assert engine.added == []

    def test_one_write_per_step_for_all_choices(self, engine: Any, connect: Any, finish: Any) -> None:
        engine.reply = None
        connection = connect("/v1/completions", {"prompt": "x", "stream": True, "n": 4, "max_tokens": 10, "seed": 1})
        finish(connection.run())
        bodies = [message["body"] for message in connection.sent[1:]]
        assert sum(body.count(b"data: ") for body in bodies) == 41
        assert len(bodies) <= 13
        assert bodies[-1].endswith(b"data: [DONE]\n\n")
        assert [message["more_body"] for message in connection.sent[1:]] == [True] * (len(bodies) - 1) + [False]


class TestWithoutTokenizer:
    @pytest.fixture
    def client(self, engine: Any, client: Any) -> Any:
        engine.reply = None
        return type(client)(make_app(engine, ServerSettings(text_in=TextIn(), served_model_names=("ids",))))

    def test_token_ids_without_text(self, client: Any, events: Any) -> None:
        fields = {"model": "ids", "prompt": [1, 2, 3], "max_tokens": 5, "stop": "x"}
        body = client.complete(**fields, logprobs=0).json()
        assert body["choices"][0]["text"] == ""
        assert body["usage"]["completion_tokens"] == 5
        assert body["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
        assert len(events(client.complete(**fields, stream=True))) == 6

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("/v1/completions", {"prompt": "text"}, "prompt"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "messages"),
            ("/tokenize", {"prompt": "text"}, "prompt"),
            ("/detokenize", {"tokens": [1]}, "tokens"),
        ],
    )
    def test_text_is_refused(self, client: Any, path: str, body: Any, param: str) -> None:
        response = client.post(path, body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert "no tokenizer" in response.json()["error"]["message"]


def test_long_prompts_are_tokenized_in_threads(client: Any, engine: Any) -> None:
    engine.max_model_len = 40_000
    text = "one two three " * 2_000
    assert client.complete(prompt=text).status_code == 200
    assert client.chat(messages=[{"role": "user", "content": text}]).status_code == 200
    assert len(engine.added) == 2


def test_content_type_is_ignored(client: Any) -> None:
    body = json.dumps({"prompt": "hello"}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8"):
        assert client.post("/v1/completions", content=body, headers={"content-type": kind}).status_code == 200
