"""Sampling fields as the engine receives them, and log probabilities of prompts."""

from typing import Any

import msgspec
import pytest

from quire.frontend.http.app import make_app
from quire.frontend.http.schema.sampling_fields import response_format
from quire.frontend.http.serving.server import ServerSettings
from quire.protocol.request.logits_processors import AdapterLogitsProcessor
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.request.structured_outputs import RepetitionDetection, StructuredOutputs
from quire.protocol.wire.front_end_messages import EndReason

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
REPLY = "one two three four five"


class TestFields:
    def test_sampling_fields_reach_the_engine(self, client: Any, engine: Any) -> None:
        fields = {
            "min_tokens": 2,
            "presence_penalty": 0.5,
            "frequency_penalty": -1,
            "repetition_penalty": 1.25,
            "allowed_token_ids": [5, 6, 419],
            "thinking_token_budget": 7,
            "prompt_logprobs": 3,
        }
        for ask in (client.complete, client.chat):
            assert ask(**fields).status_code == 200
            params = engine.added[-1].params
            assert {name: getattr(params, name) for name in fields} == fields

    def test_logit_bias_keys_are_token_ids(self, client: Any, engine: Any) -> None:
        assert client.complete(logit_bias={"0": -100, "419": 1.5}).status_code == 200
        assert engine.added[0].params.logit_bias == {0: -100.0, 419: 1.5}

    @pytest.mark.parametrize("name", ["extra_args", "vllm_xargs"])
    def test_both_names_of_extra_args(self, client: Any, engine: Any, name: str) -> None:
        assert client.chat(**{name: {"target": 5, "words": ["a"], "on": None}}).status_code == 200
        assert engine.added[0].params.extra_args == {"target": 5, "words": ["a"], "on": None}

    def test_repetition_detection(self, client: Any, engine: Any) -> None:
        given = {"max_pattern_size": 8, "min_count": 4, "min_pattern_size": None}
        assert client.complete(repetition_detection=given).status_code == 200
        assert engine.added[0].params.repetition_detection == RepetitionDetection(max_pattern_size=8, min_count=4)
        engine.ending = EndReason.REPETITION
        assert client.complete(max_tokens=50).json()["choices"][0]["finish_reason"] == "repetition"

    @pytest.mark.parametrize(
        ("given", "kind"),
        [
            ({"json": SCHEMA}, "json"),
            ({"json": '{"type": "object"}'}, "json"),
            ({"json_object": True}, "json_object"),
            ({"regex": "a+", "json": None}, "regex"),
            ({"choice": ["a", "b"]}, "choice"),
            ({"grammar": 'root ::= "a"'}, "grammar"),
        ],
    )
    def test_structured_outputs(self, client: Any, engine: Any, given: Any, kind: str) -> None:
        assert client.complete(structured_outputs=given).status_code == 200
        assert engine.added[0].params.structured_outputs.kind == kind

    def test_response_formats(self, client: Any, engine: Any) -> None:
        described = {"name": "answer", "schema": SCHEMA, "strict": True, "description": "x"}
        wanted = {"type": "json_schema", "json_schema": described}
        for ask in (client.chat, client.complete):
            assert ask(response_format=wanted).status_code == 200
            text = engine.added[-1].params.structured_outputs.json
            # The order of the properties is kept: the output has the same order.
            assert text == msgspec.json.encode(SCHEMA).decode()
            assert ask(response_format={"type": "text"}).status_code == 200
            assert engine.added[-1].params.structured_outputs is None
        assert response_format({"type": "json_object"}) == StructuredOutputs(json_object=True)

    def test_text_format_can_be_combined_with_a_constraint(self, client: Any, engine: Any) -> None:
        fields = {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}
        assert client.chat(**fields).status_code == 200
        assert engine.added[0].params.structured_outputs.regex == "a"


class Picky(AdapterLogitsProcessor):
    """A processor whose validation raises ValueError with a message, or an unexpected KeyError."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if "fail" in sampling_params.extra_args:
            raise KeyError("secret")
        if not isinstance(sampling_params.extra_args.get("only", 0), int):
            raise ValueError("only must be\na token id")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> None:
        return None


class TestPlugins:
    @pytest.fixture
    def client(self, engine: Any, text_in: Any, client: Any) -> Any:
        settings = ServerSettings(text_in=text_in, served_model_names=("tiny",), processors=(Picky,))
        return type(client)(make_app(engine, settings))

    @pytest.mark.parametrize("name", ["extra_args", "vllm_xargs"])
    def test_processors_validate_each_request(self, client: Any, engine: Any, name: str) -> None:
        for ask in (client.complete, client.chat):
            for given, says in (({"only": "x"}, "only must be a token id"), ({"fail": 1}, "Picky failed to validate")):
                refused = ask(**{name: given})
                assert refused.status_code == 400
                error = refused.json()["error"]
                assert (error["param"], says in error["message"]) == (name, True)
                assert "secret" not in refused.text
            assert ask(**{name: {"only": 5}}).status_code == 200
        assert len(engine.added) == 2


class TestBadWords:
    def test_each_word_is_also_forbidden_with_a_leading_space(self, client: Any, engine: Any, tokenizer: Any) -> None:
        assert client.complete(bad_words=["hello", " two"]).status_code == 200
        texts = ["hello", " hello", " two"]
        assert engine.added[0].params.bad_words_token_ids == [tokenizer.encode(text).ids for text in texts]
        assert len(tokenizer.encode(" hello").ids) != len(tokenizer.encode("hello").ids)


def prompt_entries(ids: list[int], best: int) -> list[Any]:
    """Return the expected entries in vLLM's format."""
    entries: list[Any] = [None]
    for i, token in enumerate(ids[1:], 1):
        top = {5: (-0.25, 1), 6: (-9999.0, 2)}
        found = {t: top[t] for t in list(top)[:best]} | {token: (-float(i), i + 1)}
        entries.append({str(t): v for t, v in found.items()})
    return entries


def plain(entries: list[Any]) -> list[Any]:
    return [e and {t: (lp["logprob"], lp["rank"]) for t, lp in e.items()} for e in entries]


class TestPromptLogprobs:
    @pytest.mark.parametrize("best", [0, 1, 2])
    def test_by_token_id(self, client: Any, best: int) -> None:
        ids = [40, 41, 42, 43]
        body = client.complete(prompt=ids, prompt_logprobs=best, n=2).json()
        for choice in body["choices"]:
            assert plain(choice["prompt_logprobs"]) == prompt_entries(ids, best)
            assert choice["logprobs"] is None
        assert "prompt_logprobs" not in client.complete(prompt=ids).json()["choices"][0]

    def test_chat_prompt(self, client: Any, engine: Any) -> None:
        body = client.chat(prompt_logprobs=1).json()
        assert plain(body["prompt_logprobs"]) == prompt_entries(engine.added[0].prompt, 1)
        assert "prompt_logprobs" not in client.chat().json()

    def test_tokens_have_their_text(self, client: Any, tokenizer: Any) -> None:
        entry = client.complete(prompt=[40, 41], prompt_logprobs=0).json()["choices"][0]["prompt_logprobs"][1]
        assert entry == {"41": {"logprob": -1.0, "rank": 2, "decoded_token": tokenizer.decode([41])}}

    def test_first_token_has_none(self, client: Any) -> None:
        body = client.complete(prompt=[40], prompt_logprobs=2, echo=True, logprobs=1, max_tokens=0).json()
        assert body["choices"][0]["prompt_logprobs"] == [None]
        assert body["choices"][0]["logprobs"]["token_logprobs"] == [None]


class TestEcho:
    """Requests as lm-eval sends them, for the likelihood of each token of a text."""

    @pytest.mark.parametrize("as_ids", [False, True])
    def test_prompt_alone(self, client: Any, engine: Any, tokenizer: Any, as_ids: bool) -> None:
        ids = tokenizer.encode("hello world, how").ids
        prompt = [ids, ids[:3]] if as_ids else ["hello world, how", tokenizer.decode(ids[:3])]
        body = client.complete(prompt=prompt, max_tokens=0, echo=True, logprobs=1, temperature=0).json()
        assert [choice["text"] for choice in body["choices"]] == ["hello world, how", tokenizer.decode(ids[:3])]
        first = body["choices"][0]
        assert first["finish_reason"] == "length"
        assert first["logprobs"]["tokens"] == [tokenizer.decode([token]) for token in ids]
        assert first["logprobs"]["token_logprobs"] == [None, *(-float(i) for i in range(1, len(ids)))]
        assert first["logprobs"]["top_logprobs"][0] is None
        assert first["logprobs"]["top_logprobs"][1] == {tokenizer.decode([5]): -0.25, tokenizer.decode([ids[1]]): -1.0}
        for token, offset in zip(first["logprobs"]["tokens"], first["logprobs"]["text_offset"], strict=True):
            assert first["text"][offset:].startswith(token)
        assert body["usage"]["completion_tokens"] == 0
        assert engine.added[0].params.max_tokens == 1
        assert "prompt_logprobs" not in first

    def test_prompt_and_output(self, client: Any, tokenizer: Any, events: Any) -> None:
        fields = {"prompt": "hello", "echo": True, "logprobs": 2, "max_tokens": 50}
        choice = client.complete(**fields).json()["choices"][0]
        assert choice["text"] == "hello" + REPLY
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == "hello" + REPLY + "<|im_end|>"
        for token, offset in zip(logprobs["tokens"][:-1], logprobs["text_offset"], strict=False):
            assert choice["text"][offset:].startswith(token)
        parts = [event["choices"][0] for event in events(client.complete(**fields, stream=True))[:-1]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, values in logprobs.items():
            assert [value for part in parts for value in part["logprobs"][name]] == values

    def test_echo_alone(self, client: Any, events: Any) -> None:
        assert client.complete(echo=True, max_tokens=0).json()["choices"][0]["text"] == "hello"
        got = events(client.complete(echo=True, max_tokens=0, stream=True, n=2))[:-1]
        assert [(event["choices"][0]["text"], event["choices"][0]["finish_reason"]) for event in got] == [
            ("hello", "length")
        ] * 2

    def test_logprobs_and_prompt_logprobs_may_differ(self, client: Any) -> None:
        """``logprobs`` of an echoed prompt and ``prompt_logprobs`` return different numbers of entries."""
        fields = {"echo": True, "max_tokens": 0, "prompt": [40, 41]}
        for logprobs, of_prompt in ((0, 2), (2, 0)):
            choice = client.complete(**fields, logprobs=logprobs, prompt_logprobs=of_prompt).json()["choices"][0]
            assert len(choice["logprobs"]["top_logprobs"][1]) == 1 + logprobs
            assert len(choice["prompt_logprobs"][1]) == 1 + of_prompt


class TestFailures:
    @pytest.mark.parametrize(
        ("detail", "status", "code", "says"),
        [
            ("request_failed: no token is allowed", 422, "request_failed", "no token is allowed"),
            ("numerical_error: not finite", 500, "numerical_error", "not finite"),
            ("engine_fault: the engine stopped", 500, "engine_fault", "the engine stopped"),
            ("something else: x", 500, "engine_error", "something else: x"),
        ],
    )
    def test_status_by_code(self, client: Any, engine: Any, detail: str, status: int, code: str, says: str) -> None:
        engine.ending, engine.detail = EndReason.ERROR, detail
        response = client.complete(max_tokens=50)
        assert response.status_code == status
        error = response.json()["error"]
        assert (error["message"], error["code"]) == (says, code)
        assert error["type"] == ("invalid_request_error" if status == 422 else "internal_error")

    def test_failure_within_a_stream(self, client: Any, engine: Any, events: Any) -> None:
        engine.ending, engine.detail = EndReason.ERROR, "request_failed: no token is allowed"
        got = events(client.complete(max_tokens=50, stream=True))
        assert got[0]["choices"][0]["text"]
        assert got[-1]["error"]["code"] == "request_failed"

    def test_failure_before_the_first_event(self, client: Any, engine: Any) -> None:
        engine.ending, engine.detail = EndReason.ERROR, "request_failed: a processor failed"
        engine.per_update = 100
        assert client.complete(max_tokens=50, stream=True).status_code == 422
