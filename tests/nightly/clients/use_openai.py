"""openai: chat completions and Responses, with and without streams."""

import json
from typing import Any, Literal

import openai
from checks import KEY, MODEL, URL, all_called, called, look_up_json, report, tool_results
from conversations import (
    AS_JSON,
    DEGREES,
    FINAL,
    FUNCTION,
    GOODBYE,
    GREETING,
    HELLO,
    LOOKED_UP,
    NEXT,
    OBJECT,
    QUESTION,
    THANKS,
    WELCOME,
)
from pydantic import BaseModel

client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
RESPONSES_TOOLS: Any = [{"type": "function", "strict": True, **FUNCTION}]


class Weather(BaseModel):
    city: Literal["Rome"]
    degrees: Literal[21]


class RomeOnly(BaseModel):
    """Return the temperature in Rome."""

    city: Literal["Rome"]


def chat_second_turn() -> None:
    messages: list[Any] = [{"role": "user", "content": GREETING}]
    first = client.chat.completions.create(model=MODEL, messages=messages).choices[0].message
    messages += [first, {"role": "user", "content": NEXT}]
    second = client.chat.completions.create(model=MODEL, messages=messages).choices[0].message
    assert (first.content, second.content) == (HELLO, GOODBYE)


def chat_tool_loop() -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(len(DEGREES)):
        answer = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0].message
        messages.append(answer)
        messages += tool_results(answer)
    all_called()
    for question, expected in ((None, FINAL), (THANKS, WELCOME)):
        if question:
            messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0].message
        assert answer.content == expected
        messages.append(answer)


def chat_stream() -> None:
    """The helper collects the message, which is sent back as it is."""
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as stream:
            for _ in stream:
                pass
            answer = stream.get_final_completion().choices[0].message
        messages.append(answer)
        if not answer.tool_calls:
            break
        messages += tool_results(answer)
    all_called()
    assert answer.content == FINAL


def chat_structured() -> None:
    messages: Any = [{"role": "user", "content": AS_JSON}]
    answer = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Weather)
    assert answer.choices[0].message.parsed == Weather(**OBJECT)
    messages = [{"role": "user", "content": LOOKED_UP}]
    fields: Any = {"model": MODEL, "response_format": Weather, "parallel_tool_calls": False}
    fields["tools"] = [openai.pydantic_function_tool(RomeOnly, name="temperature")]
    with client.chat.completions.stream(messages=messages, **fields) as stream:
        asked = stream.get_final_completion().choices[0].message
    (call,) = asked.tool_calls or []
    assert call.function.parsed_arguments == RomeOnly(city="Rome")
    messages += [asked, {"role": "tool", "tool_call_id": call.id, "content": look_up_json(call.function.arguments)}]
    answer = client.chat.completions.parse(messages=messages, **fields)
    assert answer.choices[0].message.parsed == Weather(**OBJECT)


def responses_second_turn() -> None:
    first = client.responses.create(model=MODEL, input=GREETING, store=True)
    items: list[Any] = [{"role": "user", "content": GREETING}, *first.output, {"role": "user", "content": NEXT}]
    second = client.responses.create(model=MODEL, input=items)
    stored = client.responses.create(model=MODEL, input=NEXT, previous_response_id=first.id)
    assert [r.output_text for r in (first, second, stored)] == [HELLO, GOODBYE, GOODBYE]


def responses_tool_loop() -> None:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(len(DEGREES)):
        response = client.responses.create(model=MODEL, input=items, tools=RESPONSES_TOOLS, store=False)
        items += response.output
        items += _outputs(response.output)
    all_called()
    response = client.responses.create(model=MODEL, input=items, tools=RESPONSES_TOOLS, store=False)
    assert response.output_text == FINAL
    items += [*response.output, {"role": "user", "content": THANKS}]
    assert client.responses.create(model=MODEL, input=items, tools=RESPONSES_TOOLS).output_text == WELCOME


def responses_stream() -> None:
    """The server keeps the conversation."""
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    previous: Any = openai.omit
    while items:
        with client.responses.stream(
            model=MODEL, input=items, tools=RESPONSES_TOOLS, previous_response_id=previous
        ) as stream:
            for _ in stream:
                pass
            response = stream.get_final_response()
        previous, items = response.id, _outputs(response.output)
    all_called()
    assert response.output_text == FINAL


def responses_are_stored() -> None:
    """Later turns find the conversation in the prefix cache, and a stored response can be read and deleted."""
    first = client.responses.create(model=MODEL, input=GREETING * 4)
    second = client.responses.create(model=MODEL, input=NEXT, previous_response_id=first.id)
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 16
    assert client.responses.retrieve(second.id).output_text == second.output_text == GOODBYE
    client.responses.delete(second.id)
    try:
        client.responses.retrieve(second.id)
    except openai.NotFoundError:
        return
    raise AssertionError("a deleted response was found")


def responses_in_background() -> None:
    """Polled, followed from the middle of its events, and cancelled."""
    polled = client.responses.create(model=MODEL, input=GREETING, background=True)
    assert polled.status == "queued"
    while polled.status in ("queued", "in_progress"):
        polled = client.responses.retrieve(polled.id)
    assert polled.output_text == HELLO
    with client.responses.create(model=MODEL, input=GREETING, background=True, stream=True) as events:
        begun = [next(events) for _ in range(4)]
    response_id = begun[0].response.id
    rest = [*client.responses.retrieve(response_id, stream=True, starting_after=3)]
    assert [event.sequence_number for event in [*begun, *rest]] == [*range(4 + len(rest))]
    assert rest[-1].response.output_text == HELLO
    cancelled = client.responses.create(model=MODEL, input=QUESTION, background=True)
    assert client.responses.cancel(cancelled.id).status in ("cancelled", "completed")


def _outputs(output: list[Any]) -> list[Any]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": look_up_json(item.arguments)}
        for item in output
        if item.type == "function_call"
    ]


def responses_structured() -> None:
    response = client.responses.parse(model=MODEL, input=AS_JSON, text_format=Weather)
    assert response.output_parsed == Weather(**OBJECT)
    tool = openai.pydantic_function_tool(RomeOnly, name="temperature")["function"]
    fields: Any = {"model": MODEL, "text_format": Weather, "parallel_tool_calls": False}
    fields["tools"] = [{"type": "function", **tool}]
    first = client.responses.parse(input=LOOKED_UP, **fields)
    second = client.responses.parse(input=_outputs(first.output), previous_response_id=first.id, **fields)
    assert (first.output_parsed, second.output_parsed) == (None, Weather(**OBJECT))


def completions() -> None:
    answer = client.completions.create(model=MODEL, prompt="hello", max_tokens=4)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert json.loads(client.models.list().model_dump_json())["data"][0]["id"] == MODEL
    assert not called


def decisions() -> None:
    """Values of choices keep their type, and several questions share a conversation."""
    asked: list[Any] = [
        {"type": "predicate", "name": "greets", "instructions": "It is a greeting."},
        {"type": "choice", "instructions": "Which?", "choices": [{"value": True}, {"value": "true"}, {"value": "a"}]},
        {"type": "score", "instructions": "How warm?", "levels": [{"label": "cold"}, {"label": "warm"}]},
    ]
    items: list[Any] = [{"role": "system", "content": "Be strict."}, {"role": "user", "content": GREETING}]
    for given in (GREETING, items):
        greets, which, warm = client.decisions.create(model=MODEL, input=given, questions=asked).answers
        assert greets.type == "predicate" and greets.name == "greets" and 0 <= greets.probability <= 1
        assert which.type == "choice" and [each.value for each in which.probabilities] == [True, "true", "a"]
        assert warm.type == "score" and [each.label for each in warm.probabilities] == ["cold", "warm"]
        for answer in (which, warm):
            assert abs(sum(each.probability for each in answer.probabilities) - 1) < 1e-6
    try:
        client.decisions.create(model=MODEL, input=GREETING, questions=[])
    except openai.BadRequestError as error:
        assert error.param == "questions"
        return
    raise AssertionError("a request without questions was accepted")


report(
    [
        *(chat_second_turn, chat_tool_loop, chat_stream, chat_structured),
        *(responses_second_turn, responses_tool_loop, responses_stream, responses_structured),
        *(responses_are_stored, responses_in_background, completions, decisions),
    ],
    "openai",
)
