"""Open sessions over HTTP: the prompt of each piece is all tokens so far, and those of the piece."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fake_engine import FakeEngine
from tokenizers import Tokenizer

from quire.frontend.http.app import make_app
from quire.frontend.http.routes import generate
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.sessions.session_store import SessionStore
from quire.frontend.text.chat_template import ChatTemplate
from quire.frontend.text.text_in import TextIn
from quire.protocol.errors import InvalidRequest
from quire.protocol.wire.front_end_messages import EndReason

GREEDY = {"temperature": 0, "max_tokens": 100}
PATH = "/v1/sessions"


def opened(client: Any) -> str:
    body = client.post(PATH).json()
    assert (body["object"], body["status"], body["pieces"], body["tokens"]) == ("session", "idle", 0, 0)
    session_id: str = body["id"]
    return session_id


def prompt(engine: FakeEngine) -> list[int]:
    return engine.added[-1].prompt


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text).ids)


def say(text: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def error_of(response: Any, status: int) -> Any:
    assert response.status_code == status, response.text
    return response.json()["error"]


def test_a_piece_continues_all_tokens_so_far(client: Any, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    session = opened(client)
    first = client.complete(prompt="hello", session=session, **GREEDY)
    assert first.json()["choices"][0]["text"] == engine.reply
    so_far = ids(tokenizer, "hello") + ids(tokenizer, str(engine.reply)) + [2]
    again = client.complete(prompt=" world", session={"id": session, "piece": 1}, **GREEDY)
    so_far += ids(tokenizer, " world")
    assert prompt(engine) == so_far and again.json()["usage"]["prompt_tokens"] == len(so_far)
    shown = client.get(f"{PATH}/{session}").json()
    assert (shown["pieces"], shown["tokens"]) == (2, len(so_far) + len(engine.added[-1].tokens))


@pytest.mark.parametrize("stream", [False, True])
def test_a_piece_without_an_answer(client: Any, engine: FakeEngine, tokenizer: Tokenizer, stream: bool) -> None:
    session = opened(client)
    response = client.complete(prompt="one two", session=session, max_tokens=0, stream=stream)
    assert response.status_code == 200 and engine.added[-1].params.max_tokens == 1
    client.complete(prompt=[7, 8], session=session, max_tokens=0)
    client.complete(prompt="", session=session, **GREEDY)
    assert prompt(engine) == [*ids(tokenizer, "one two"), 7, 8]


def test_a_stop_string_ends_the_tokens_of_the_answer(client: Any, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    session = opened(client)
    client.complete(prompt="hello", session=session, stop="two", **GREEDY)
    client.complete(prompt=[9], session=session, **GREEDY)
    answer = ids(tokenizer, str(engine.reply))
    kept = prompt(engine)[len(ids(tokenizer, "hello")) : -1]
    assert kept == answer[: len(kept)] and tokenizer.decode(kept) == "one two"


class TestChat:
    def test_further_messages_follow_the_answer_as_it_was_sampled(
        self, client: Any, engine: FakeEngine, tokenizer: Tokenizer
    ) -> None:
        session = opened(client)
        client.chat(messages=[*say("be kind", "system"), *say("hello")], session=session, **GREEDY)
        so_far = prompt(engine) + engine.added[-1].tokens
        client.chat(messages=say("more"), session=session, **GREEDY)
        rest = tokenizer.encode("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n").ids
        assert prompt(engine) == so_far + rest  # the answer's own <|im_end|> is not repeated

    def test_a_cut_answer_gets_its_end_from_the_template(
        self, client: Any, engine: FakeEngine, tokenizer: Tokenizer
    ) -> None:
        session = opened(client)
        client.chat(session=session, temperature=0, max_tokens=2)
        so_far = prompt(engine) + engine.added[-1].tokens[:2]
        client.chat(messages=say("<|im_end|>"), session=session, **GREEDY)
        text = tokenizer.decode(prompt(engine)[len(so_far) :], skip_special_tokens=False)
        assert text == "<|im_end|>\n<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n"
        assert prompt(engine).count(2) == 3  # a client cannot write a special token

    def test_messages_without_an_answer(self, client: Any, engine: FakeEngine, tokenizer: Tokenizer) -> None:
        session = opened(client)
        client.chat(messages=[*say("be kind", "system"), *say("one")], session=session, max_completion_tokens=0)
        client.chat(messages=say("two"), session=session, max_tokens=0)
        client.chat(messages=say("three", "tool"), session=session, max_tokens=0)
        client.chat(messages=say("four"), session=session, **GREEDY)
        whole = [("system", "be kind"), ("user", "one"), ("user", "two"), ("tool", "three"), ("user", "four")]
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in whole)
        assert prompt(engine) == ids(tokenizer, f"{text}<|im_start|>assistant\n")

    def test_a_template_without_earlier_turns_is_refused(
        self, client: Any, engine: FakeEngine, tokenizer: Tokenizer
    ) -> None:
        only_last = ChatTemplate("{{ messages[-1].content }}", {}, "test")
        settings = ServerSettings(text_in=TextIn(tokenizer, only_last), served_model_names=("tiny",))
        client = type(client)(make_app(engine, settings))
        session = opened(client)
        assert client.chat(session=session, **GREEDY).status_code == 200
        error = error_of(client.chat(session=session, **GREEDY), 400)
        assert error["param"] == "session" and "without session" in error["message"]

    @pytest.mark.parametrize("name", ["add_generation_prompt", "continue_final_message"])
    def test_fields_that_contradict_it(self, client: Any, name: str) -> None:
        assert error_of(client.chat(session=opened(client), **{name: True}, **GREEDY), 400)["param"] == name

    def test_text_and_chat_do_not_mix(self, client: Any) -> None:
        session = opened(client)
        client.complete(session=session, **GREEDY)
        assert "does not accept messages" in error_of(client.chat(session=session, **GREEDY), 400)["message"]
        session = opened(client)
        client.chat(session=session, **GREEDY)
        assert "does not accept text" in error_of(client.complete(session=session, **GREEDY), 400)["message"]


class TestRefusals:
    def test_unknown_and_ended_sessions(self, client: Any) -> None:
        session = opened(client)
        assert client.request("DELETE", f"{PATH}/{session}").json()["status"] == "ended"
        for wrong in (session, "sess_" + "0" * 32, "sess_" + "7" * 32, "sess_", "x", "sess_" + "9" * 100):
            error = error_of(client.complete(session=wrong), 404)
            assert (error["param"], error["code"]) == ("session", "session_not_found") and wrong[:40] in error[
                "message"
            ]
            for method in ("GET", "DELETE"):
                assert client.request(method, f"{PATH}/{wrong}").status_code == 404

    def test_a_session_ends_with_a_piece_that_closes_it(self, client: Any) -> None:
        session = opened(client)
        assert client.complete(session={"id": session, "close": True}, **GREEDY).status_code == 200
        error_of(client.complete(session=session), 404)

    def test_another_key(self, client: Any, engine: FakeEngine, text_in: TextIn) -> None:
        settings = ServerSettings(text_in=text_in, served_model_names=("tiny",), api_keys=("mine", "other"))
        client = type(client)(make_app(engine, settings))
        mine, other = ({"authorization": f"Bearer {key}"} for key in ("mine", "other"))
        session = client.request("POST", PATH, headers=mine).json()["id"]
        body = {"prompt": "hello", "session": session}
        error_of(client.post("/v1/completions", body, headers=other), 404)
        error_of(client.request("DELETE", f"{PATH}/{session}", headers=other), 404)
        assert client.post("/v1/completions", body, headers=mine).status_code == 200
        assert client.request("POST", PATH).status_code == 401

    def test_a_piece_out_of_order(self, client: Any, engine: FakeEngine) -> None:
        session = opened(client)
        client.complete(session={"id": session, "piece": 0}, **GREEDY)
        for number in (0, 2):
            error = error_of(client.complete(session={"id": session, "piece": number}, **GREEDY), 409)
            assert error["code"] == "session_out_of_order" and error["param"] == "session.piece"
            assert f"must be 1, the number of the next piece of {session} (got {number})" in error["message"]
        assert len(engine.added) == 1

    def test_a_refused_piece_leaves_the_session_as_it_was(self, client: Any, engine: FakeEngine) -> None:
        session = opened(client)
        client.complete(prompt=[5] * 20, session=session, max_tokens=0)
        error = error_of(client.complete(prompt=[6] * 236, session=session, max_tokens=0), 400)
        assert (error["param"], error["code"]) == ("session", "context_length_exceeded")
        assert "20 tokens and the piece 236: together they must have from 1 to 255 (got 256)" in error["message"]
        error_of(client.complete(prompt=[6], session=session, max_tokens=236), 400)
        error_of(client.complete(prompt=[10**6], session=session), 400)
        engine.ending = InvalidRequest("full", None, "queue_full")
        error_of(client.complete(prompt=[6], session=session), 503)
        engine.ending = EndReason.ERROR
        error_of(client.complete(prompt=[6], session=session), 500)
        engine.ending = EndReason.STOPPED
        client.complete(prompt=[7], session=session, **GREEDY)
        assert prompt(engine) == [5] * 20 + [7]

    def test_an_answer_that_is_refused_at_its_end(
        self, client: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine.per_update, session = 100, opened(client)
        monkeypatch.setattr(generate, "MAX_COLLECTED_VALUES", 1)
        error_of(client.complete(session=session, logprobs=2, **GREEDY), 400)
        assert client.request("GET", f"{PATH}/{session}").json()["pieces"] == 0

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"session": 3}, "session"),
            ({"session": ""}, "session.id"),
            ({"session": {}}, "session.id"),
            ({"session": {"id": "x", "piece": -1}}, "session.piece"),
            ({"session": {"id": "x", "close": 1}}, "session.close"),
            ({"session": "x", "n": 2}, "n"),
            ({"session": "x", "best_of": 2}, "best_of"),
            ({"session": "x", "use_beam_search": True, "beam_width": 2}, "use_beam_search"),
            ({"session": "x", "prompt": [[1], [2]]}, "prompt"),
            ({"session": "x", "max_tokens": -1}, "max_tokens"),
            ({"max_tokens": 0}, "max_tokens"),
        ],
    )
    def test_bad_fields(self, client: Any, fields: Any, param: str) -> None:
        assert error_of(client.complete(**fields), 400)["param"] == param

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/responses", {"input": "hello"}),
            ("/v1/messages", {"messages": say("hello"), "max_tokens": 5}),
        ],
    )
    def test_other_apis_refuse_it(self, client: Any, path: str, body: Any) -> None:
        assert "session is not supported: use" in client.post(path, {**body, "session": "x"}).json()["error"]["message"]

    def test_an_empty_piece_of_an_empty_session(self, client: Any) -> None:
        session = opened(client)
        empties: list[Any] = ["", []]
        for empty in empties:
            assert error_of(client.complete(prompt=empty, session=session), 400)["param"] == "session"

    def test_too_many_sessions(self, client: Any, engine: FakeEngine, text_in: TextIn) -> None:
        now = 0.0
        store = SessionStore(2, 10.0, now=lambda: now)
        client = type(client)(
            make_app(engine, ServerSettings(text_in=text_in, served_model_names=("tiny",), sessions=store))
        )
        first, second = opened(client), opened(client)
        error = error_of(client.post(PATH), 429)
        assert error["code"] == "too_many_sessions" and "--max-sessions is 2" in error["message"]
        now = 6.0
        client.complete(session=first, **GREEDY)
        now = 12.0
        assert client.complete(session=first, **GREEDY).status_code == 200
        error_of(client.complete(session=second, **GREEDY), 404)
        assert opened(client)

    def test_a_busy_session(
        self, client: Any, engine: FakeEngine, connect: Callable[[str, Any], Any], finish: Callable[[Any], None]
    ) -> None:
        session = opened(client)
        client.complete(prompt=[5, 6], session=session, max_tokens=0)
        engine.hang_after = 2
        first, second = (
            connect("/v1/completions", {"prompt": [token], "session": session, "stream": True, **GREEDY})
            for token in (7, 8)
        )

        async def overlap() -> None:
            running = asyncio.ensure_future(first.run())
            while len(engine.added) < 2:
                await asyncio.sleep(0)
            await engine.added[-1].waiting.wait()
            await second.run()
            first.gone.set()
            await running

        finish(overlap())
        assert second.sent[0]["status"] == 409 and b"session_busy" in second.sent[1]["body"]
        engine.hang_after = None
        client.complete(prompt=[9], session=session, **GREEDY)
        assert prompt(engine) == [5, 6, 9]  # the first client has left: its piece is not added


def test_metrics(client: Any) -> None:
    session, _ = opened(client), opened(client)
    client.complete(prompt=[5, 6, 7], session=session, max_tokens=0)
    text = client.get("/metrics").text
    for name, value in (("num_sessions", 2.0), ("num_sessions_idle", 2.0), ("session_token_bytes", 12.0)):
        assert f'quire:{name}{{model_name="tiny"}} {value}' in text
    client.request("DELETE", f"{PATH}/{session}")
    client.complete(session=session)
    text = client.get("/metrics").text
    assert 'quire:session_token_bytes{model_name="tiny"} 0.0' in text
    assert 'quire:admission_rejections_total{model_name="tiny",reason="session_not_found"} 1.0' in text
