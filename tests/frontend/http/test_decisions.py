"""POST /v1/decisions over an engine with made-up log probabilities."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from fake_engine import FakeEngine, given_logprob
from starlette.applications import Starlette

from quire.frontend.text.decisions.questions import read_questions
from quire.frontend.text.text_in import TextIn
from quire.protocol.errors import InvalidRequest
from quire.protocol.wire.front_end_messages import EndReason

PATH = "/v1/decisions"
PREDICATE = {"type": "predicate", "name": "late", "instructions": "The parcel is late."}
CHOICE = {
    "type": "choice",
    "instructions": [{"type": "input_text", "text": "Which?"}, {"type": "input_json", "data": {"a": 1}}],
    "choices": [{"value": "one"}, {"value": True, "description": "yes"}, {"value": "true"}],
}
SCORE = {"type": "score", "instructions": "How good?", "levels": [{"label": "bad"}, {"label": "good"}]}


def test_answers(client: Any, engine: FakeEngine, text_in: TextIn) -> None:
    """What all prompts begin with is computed first, then each question, then the inner tokens of answers."""
    body = client.post(PATH, {"model": "tiny", "input": "hello", "questions": [PREDICATE, CHOICE, SCORE]}).json()
    late, which, good = body["answers"]
    assert late.keys() == {"type", "name", "probability"} and (late["type"], late["name"]) == ("predicate", "late")
    assert [each["value"] for each in which["probabilities"]] == ["one", True, "true"]
    assert (which["name"], which["choice"] in ("one", True, "true")) == (None, True)
    assert [(each["value"], each["label"]) for each in good["probabilities"]] == [(0, "bad"), (1, "good")]
    for answer in (which, good):
        assert sum(each["probability"] for each in answer["probabilities"]) == pytest.approx(1)
        assert 0 < answer["confidence"] <= max(each["probability"] for each in answer["probabilities"])
    assert good["score"] == pytest.approx(good["probabilities"][1]["probability"])
    shared, *reads = (added.prompt for added in engine.added)
    assert all(read[: len(shared)] == shared for read in reads)
    texts = [text_in.decode(read, skip_special_tokens=False) for read in reads]
    head = (
        "<|im_start|>user\nhello\n\nRead the question below about the input above. Write one of its allowed answers as "
        "listed, and no more.\n\n"
    )
    end = "<|im_end|>\n<|im_start|>assistant\n"
    asked = [
        "Is this true? The parcel is late.\n\nAllowed answers:\n- yes\n- no",
        'Which?\n{"a":1}\n\nAllowed answers:\n- "one"\n- true (yes)\n- "true"',
        "How good?\n\nAllowed answers:\n- 0: bad\n- 1: good",
    ]
    assert texts[:3] == [head + text + end for text in asked]
    assert len(texts) > 3 and all(any(text.startswith(each) for each in texts[:3]) for text in texts[3:])
    num_tokens = len(shared) + sum(len(read) - len(shared) for read in reads[:3])
    usage = body["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (num_tokens, 0, num_tokens)
    assert usage["input_tokens_details"] == {"cached_tokens": len(shared) // 2, "cache_write_tokens": 0}


def test_one_token_answers_are_read_at_once(client: Any, engine: FakeEngine, text_in: TextIn) -> None:
    (answer,) = client.post(PATH, {"input": "hello", "questions": [SCORE]}).json()["answers"]
    ids = [text_in.encode(text)[0] for text in "01"]
    (read,) = engine.added
    assert read.params.logprob_token_ids == ids
    weights = [math.exp(given_logprob(token)) for token in ids]
    found = [each["probability"] for each in answer["probabilities"]]
    assert found == pytest.approx([weight / sum(weights) for weight in weights])
    assert answer["confidence"] == pytest.approx(max(weights))


def test_conversations(client: Any, engine: FakeEngine, text_in: TextIn) -> None:
    """The question is in the user's last message, or in one of its own."""
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    items = [
        {"role": "developer", "content": "Be strict."},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}, {"type": "input_json", "data": [{}]}]},
        call,
        {"type": "function_call_output", "call_id": "a", "output": "found"},
    ]
    for given, roles in ((items[:2], ["system", "user"]), (items, ["system", "user", "assistant", "tool", "user"])):
        engine.added.clear()
        response = client.post(PATH, {"input": given, "questions": [PREDICATE], "prompt_cache_key": "k"})
        assert response.status_code == 200, response.text
        text = text_in.decode(engine.added[0].prompt, skip_special_tokens=False)
        assert [turn.split("\n")[0] for turn in text.split("<|im_start|>")[1:-1]] == roles
        assert "hi\n[{}]" in text and text.index("[{}]") < text.index("Is this true?")


@pytest.mark.parametrize(
    ("fields", "says", "param"),
    [
        ({"input": None}, "input is required", "input"),
        ({"questions": None}, "questions is required", "questions"),
        ({"questions": []}, "Expected `array` of length >= 1", "questions"),
        ({"questions": [PREDICATE] * 401}, "Expected `array` of length <= 400", "questions"),
        ({"questions": "x"}, "questions: Expected `array`, got `str`", "questions"),
        ({"questions": [5]}, "questions[0]: Expected `object`, got `int`", "questions[0]"),
        ({"questions": [{"type": "box"}]}, "'box', must be predicate, choice or score", "questions[0].type"),
        ({"questions": [{"type": "tools[0].function"}]}, "Invalid value 'tools[0].function'", "questions[0].type"),
        ({"questions": [{"type": "predicate"}]}, "missing required field `instructions`", "questions[0]"),
        ({"questions": [PREDICATE | {"name": 5}]}, "Expected `str | null`, got `int`", "questions[0].name"),
        ({"questions": [PREDICATE | {"instructions": 5}]}, "Expected `str | array`", "questions[0].instructions"),
        (
            {"questions": [PREDICATE | {"instructions": [{"type": "input_image", "image_url": "x"}]}]},
            "must be one of input_text, input_json (got 'input_image')",
            "questions[0].instructions[0].type",
        ),
        ({"questions": [CHOICE | {"choices": [{"value": "a"}]}]}, "of length >= 2", "questions[0].choices"),
        ({"questions": [CHOICE | {"choices": [{"value": str(i)} for i in range(256)]}]}, "of length <= 255", None),
        ({"questions": [CHOICE | {"choices": [{"value": ""}, {"value": "a"}]}]}, "`str` of length >= 1", None),
        ({"questions": [CHOICE | {"choices": [{"value": "a"}] * 2}]}, "questions[0] has answers that are equal", None),
        (
            {"questions": [SCORE | {"levels": [{"label": "a", "x": 1}, {"label": "b"}]}]},
            "unknown field `x`",
            "questions[0].levels[0]",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0]", None),
        ({"input": "hello " * 999}, "This model's maximum context length is 256 tokens", "input"),
        ({"questions": [PREDICATE | {"instructions": "hi " * 999}]}, "maximum context length is 256", "questions[0]"),
        ({"model": "other"}, "the model 'other' does not exist", "model"),
    ],
)
def test_refusals(client: Any, engine: FakeEngine, fields: dict[str, Any], says: str, param: str | None) -> None:
    response = client.post(PATH, {"input": "hello", "questions": [PREDICATE]} | fields)
    error = response.json()["error"]
    assert response.status_code in (400, 404) and says in error["message"], error
    assert param is None or error["param"] == param
    assert not engine.added


def test_a_name_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="of valid Unicode text"):
        read_questions([PREDICATE | {"\ud800": 5}])


def test_unknown_fields_are_named(client: Any) -> None:
    response = client.post(PATH, {"input": "hello", "questions": [SCORE], "joint": True})
    assert response.headers["x-quire-ignored-fields"] == "joint"


def test_a_failed_read_ends_the_request_only(client: Any, engine: FakeEngine) -> None:
    asked = {"input": "hello", "questions": [PREDICATE, SCORE]}
    engine.reply = "o"  # one token, so that the ending is not a length
    engine.ending, engine.detail = EndReason.ERROR, "numerical_error: the model's logits are not finite"
    response = client.post(PATH, asked)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "numerical_error")
    engine.ending = InvalidRequest("no room", "prompt", "kv_pool_too_small")
    assert client.post(PATH, asked).json()["error"]["code"] == "kv_pool_too_small"
    engine.ending = EndReason.STOPPED
    assert client.post(PATH, asked).status_code == 200


def test_disconnect_aborts_the_reads(
    app: Starlette, engine: FakeEngine, connect: Any, finish: Callable[[Any], None]
) -> None:
    engine.hang_after = 0

    async def work() -> None:
        connection = connect(PATH, {"input": "hello", "questions": [SCORE]})
        engine.on_hang = connection.gone.set
        await connection.run()
        assert [sequence.aborted for sequence in engine.added] == [True]
        assert not connection.sent

    finish(work())
