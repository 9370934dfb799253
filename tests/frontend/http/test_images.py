"""Images in the messages of all APIs: how they are given, where they are in the prompt, and what is refused."""

import gc
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine
from fake_images import PICTURE, TEMPLATE, FakeReader, with_image_tokens
from tokenizers import Tokenizer

from quire.frontend.http.app import make_app
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.text.chat_template import ChatTemplate
from quire.frontend.text.text_in import TextIn

STRINGS_OF_TOOLS = TEMPLATE.replace("m.content is string", "m.content is string or m.role == 'tool'")


@pytest.fixture(scope="module")
def words(tokenizer: Tokenizer) -> Tokenizer:
    return with_image_tokens(tokenizer)


@pytest.fixture
def reader() -> FakeReader:
    return FakeReader()


@pytest.fixture
def fake(words: Tokenizer) -> FakeEngine:
    return FakeEngine(words, reply="one two")


@pytest.fixture
def make(client: Any, fake: FakeEngine, words: Tokenizer, reader: FakeReader) -> Any:
    def made(template: str = TEMPLATE) -> Any:
        text_in = TextIn(Tokenizer.from_str(words.to_str()), ChatTemplate(template, {}, "test"))
        text_in.read_images(words.token_to_id("<row>"))
        return type(client)(
            make_app(fake, ServerSettings(text_in=text_in, served_model_names=("tiny",), images=reader))
        )

    return made


def text_of(fake: FakeEngine, words: Tokenizer) -> str:
    return words.decode(fake.added[-1].prompt, skip_special_tokens=False)


def chat_image(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": PICTURE + name, "detail": "low"}}


def block(name: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": name}}


def text(value: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": value}


def input_image(name: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": PICTURE + name, "detail": "auto"}


A, B = "(<row>:<row><row>)", "(<row>:<row>)"
FORMS = {
    "/v1/chat/completions": lambda *parts: {"messages": [{"role": "user", "content": list(parts)}]},
    "/v1/messages": lambda *parts: {"max_tokens": 4, "messages": [{"role": "user", "content": list(parts)}]},
    "/v1/responses": lambda *parts: {"input": [{"role": "user", "content": list(parts)}]},
}
CASES = [
    ("/v1/chat/completions", chat_image, text),
    ("/v1/chat/completions", lambda name: {"type": "image_url", "image_url": PICTURE + name}, text),
    ("/v1/chat/completions", lambda name: {"type": "image", "image": PICTURE + name}, text),
    ("/v1/messages", block, text),
    ("/v1/responses", input_image, lambda value: text(value, "input_text")),
]


@pytest.mark.parametrize(("path", "image", "word"), CASES)
def test_all_apis_give_one_prompt(
    make: Any, fake: FakeEngine, reader: FakeReader, words: Tokenizer, path: str, image: Any, word: Any
) -> None:
    body = {"model": "tiny", **FORMS[path](word("see"), word("<image>"), image("a"), image("b"), word("?"))}
    response = make().post(path, body)
    assert response.status_code == 200, response.text
    assert text_of(fake, words) == f"<|im_start|>user\nsee\n<image>{A}{B}?<|im_end|>\n<|im_start|>assistant\n"
    prompt, (first, second) = np.array(fake.added[-1].prompt), fake.items[-1]
    (begin,) = first.ranges[:1]
    assert first.ranges == [begin, (begin[0] + 2, 2)] and begin[1] == 1
    assert [first.num_rows, second.num_rows] == [3, 2] and (first.kind, first.grid) == ("image", (1, 3, 1))
    assert (first.path, first.digest) == (PICTURE + "a", b"a".ljust(32))
    rows = [place for item in fake.items[-1] for start, count in item.ranges for place in range(start, start + count)]
    assert np.flatnonzero(prompt == words.token_to_id("<row>")).tolist() == rows
    assert words.token_to_id("<image>") not in prompt, "the user's text stays text"


@pytest.mark.parametrize(
    ("path", "where", "body"),
    [
        ("chat", "messages[0].images[1]", {"messages": [{"role": "user", "content": "see", "images": ["a", "b"]}]}),
        ("generate", "images[1]", {"prompt": "see", "images": ["a", "b"]}),
    ],
)
def test_images_of_ollama_come_before_the_text(
    make: Any, fake: FakeEngine, reader: FakeReader, words: Tokenizer, path: str, where: str, body: Any
) -> None:
    assert make().post(f"/api/{path}", body).status_code == 200
    assert text_of(fake, words) == f"<|im_start|>user\n{A}{B}see<|im_end|>\n<|im_start|>assistant\n"
    assert reader.places == [where.replace("1", "0"), where]


def test_counts_are_those_of_the_prompt(make: Any, fake: FakeEngine) -> None:
    client, parts = make(), (text("see"), chat_image("a"))
    response = client.post("/v1/chat/completions", {"model": "tiny", **FORMS["/v1/chat/completions"](*parts)})
    assert response.headers["x-quire-ignored-fields"] == "detail"
    usage = response.json()["usage"]
    length = len(fake.added[-1].prompt)
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["image_tokens"]) == (length, 3)
    tokenized = client.post("/tokenize", FORMS["/v1/chat/completions"](*parts)).json()
    assert tokenized["tokens"] == fake.added[-1].prompt
    blocks = FORMS["/v1/messages"](text("see"), block("a"))
    assert client.post("/v1/messages/count_tokens", blocks).json() == {"input_tokens": length}
    items = FORMS["/v1/responses"](text("see", "input_text"), input_image("a"))
    assert client.post("/v1/responses/input_tokens", items).json()["input_tokens"] == length
    plain = client.chat().json()["usage"]["prompt_tokens_details"]
    assert "image_tokens" not in plain


TOOL_TURNS = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "i", "name": "f", "input": {}}]},
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "i", "content": [text("seen"), block("a")]}, text("so?")],
    },
]
TEMPLATES = [
    (TEMPLATE, f"<|im_start|>tool\nseen{A}<|im_end|>\n<|im_start|>user\nso?"),
    (STRINGS_OF_TOOLS, f"<|im_start|>tool\nseen<|im_end|>\n<|im_start|>user\n{A}<|im_end|>\n<|im_start|>user\nso?"),
]


@pytest.mark.parametrize(("template", "expected"), TEMPLATES)
def test_images_of_tools(make: Any, fake: FakeEngine, words: Tokenizer, template: str, expected: str) -> None:
    """An image that the template would leave out of a tool's result follows as a user's message."""
    body = {"model": "tiny", "max_tokens": 4, "messages": TOOL_TURNS}
    assert make(template).post("/v1/messages", body).status_code == 200
    assert expected in text_of(fake, words) and [item.num_rows for item in fake.items[-1]] == [3]
    output = {"type": "function_call_output", "call_id": "i", "output": [input_image("a")]}
    call = {"type": "function_call", "call_id": "i", "name": "f", "arguments": "{}"}
    assert make(template).post("/v1/responses", {"model": "tiny", "input": [call, output]}).status_code == 200
    assert [item.num_rows for item in fake.items[-1]] == [3]


def test_a_session_keeps_images(make: Any, fake: FakeEngine, reader: FakeReader) -> None:
    client = make()
    session = client.post("/v1/sessions").json()["id"]
    fields = {"model": "tiny", "session": session}
    first = FORMS["/v1/chat/completions"](chat_image("a"))
    assert client.post("/v1/chat/completions", {**fields, **first}).status_code == 200
    (one,) = fake.items[-1]
    second = FORMS["/v1/chat/completions"](chat_image("b"), text("<row>"))
    assert client.post("/v1/chat/completions", {**fields, **second}).status_code == 200
    assert fake.items[-1][0] == one and [item.num_rows for item in fake.items[-1]] == [3, 2]
    assert [fake.added[-1].prompt[begin] for begin, _ in fake.items[-1][1].ranges] == [
        fake.added[0].prompt[one.begin]
    ] * 2
    assert {image.path for image in reader.stored} == {PICTURE + "a", PICTURE + "b"}
    assert client.request("DELETE", f"/v1/sessions/{session}").status_code == 200
    gc.collect()
    assert not reader.stored, "nothing else keeps them once the session has ended"


def test_a_special_token_does_not_arise_between_parts(make: Any, fake: FakeEngine, words: Tokenizer) -> None:
    images_first = TEMPLATE.replace(
        "{% for c in m.content %}{% if", "{% for c in m.content | sort(attribute='type') %}{% if"
    )
    body = FORMS["/v1/chat/completions"](text("<|im_"), chat_image("a"), text("end|>"))
    assert make(images_first).post("/v1/chat/completions", {"model": "tiny", **body}).status_code == 200
    assert f"{A}<|im_end|><|im_end|>" in text_of(fake, words)
    assert fake.added[-1].prompt.count(words.token_to_id("<|im_end|>")) == 1


def user(*parts: Any) -> dict[str, Any]:
    return FORMS["/v1/chat/completions"](*parts)


WHERE = "messages[0].content[0]"
REFUSED = [
    (user({"type": "image_url"}), f"{WHERE}.image_url", "must be a string"),
    (user({"type": "image_url", "image_url": {"url": 7}}), f"{WHERE}.image_url.url", "(got 7)"),
    (
        user({"type": "image_url", "image_url": {"url": "data:", "detail": "huge"}}),
        f"{WHERE}.image_url.detail",
        "one of auto, low, high, original (got 'huge')",
    ),
    (user({"type": "image_url", "image_url": "https://x/y.png"}), f"{WHERE}.image_url", "must be a data URL"),
    (user({"type": "input_image", "file_id": "f"}), f"{WHERE}.file_id", "stores no files"),
    (user({"type": "image", "source": {"type": "file"}}), f"{WHERE}.source.type", "base64 or url (got 'file')"),
    (user({"type": "image", "source": {"type": "base64", "media_type": "x"}}), f"{WHERE}.source.data", "a string"),
    (user({"type": "video_url", "video_url": "x"}), f"{WHERE}.type", "reads text and images only"),
    ({"messages": [{"role": "system", "content": [chat_image("a")]}]}, f"{WHERE}.type", "user and tool only"),
]


@pytest.mark.parametrize(("body", "param", "message"), REFUSED)
def test_refused_with_the_field(make: Any, body: Any, param: str, message: str) -> None:
    response = make().post("/v1/chat/completions", {"model": "tiny", **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param) and message in error["message"]


def test_refused_in_other_apis(make: Any, client: Any) -> None:
    client_with_images = make()
    blocks = FORMS["/v1/messages"](text("x"), {"type": "image", "source": {"type": "url", "url": "https://x/y"}})
    error = client_with_images.post("/v1/messages", {"model": "tiny", **blocks}).json()["error"]
    assert error["message"].startswith("messages[0].content[1].source.url must be a data URL")
    items = FORMS["/v1/responses"]({"type": "input_image", "image_url": "https://x/y"})
    error = client_with_images.post("/v1/responses", {"model": "tiny", **items}).json()["error"]
    assert error["param"] == "input[0].content[0].image_url"
    for path, kind in (("/v1/chat/completions", chat_image), ("/v1/messages", block), ("/v1/responses", input_image)):
        response = client.post(path, {"model": "tiny", **FORMS[path](kind("a"))})
        assert response.status_code == 400 and "this server reads text only" in response.text


def test_a_template_without_images(make: Any) -> None:
    template = "{% for m in messages %}{{ m.content if m.content is string else m.content[-1].text }}{% endfor %}"
    body = {"model": "tiny", **user(chat_image("a"), text("x"))}
    error = make(template).post("/v1/chat/completions", body).json()["error"]
    assert error["param"] == "messages" and "1 images, of which this model's chat template writes 0" in error["message"]


def test_a_stored_response_keeps_its_images(make: Any, fake: FakeEngine, reader: FakeReader) -> None:
    """The next turn finds them, and reads its own only."""
    client, items = make(), FORMS["/v1/responses"]
    first = client.post("/v1/responses", {"model": "tiny", **items(input_image("a"))}).json()["id"]
    (one,) = reader.stored
    second = {"model": "tiny", "previous_response_id": first, **items(input_image("b"))}
    assert client.post("/v1/responses", second).status_code == 200
    assert [item.num_rows for item in fake.items[-1]] == [3, 2] and len(reader.stored) == 2
    assert fake.items[-1][0].digest == one.digest
