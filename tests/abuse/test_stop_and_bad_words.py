"""Stop strings and bad words: too many, too long, empty, with odd characters, or of another type."""

import pytest
from abuse import AbusedServer
from abused_app import AbusedApp

ODD = (
    *("\x00", "\n", "\t", "\ufffd", "\u202e", "\ufeff", "😀", "👩‍👩‍👧", "e\u0301", "\U0010ffff", "<|im_end|>"),
    *("\ue0f0", "\\", '"', "'", "%s"),
)


def test_stop_strings_of_odd_characters(app: AbusedApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them occurs in this output."""
    monkeypatch.setattr(app.engine, "reply", "one two three four five")
    plain = app.complete().json()["choices"][0]["text"]
    for stop in (*ODD, [*ODD], ["\x00" * 1024], [f"{i:0100}" for i in range(64)], *([unit * 100] for unit in ODD)):
        response = app.complete(stop=stop)
        assert response.json()["choices"][0]["text"] == plain, stop


def test_largest_allowed_number_of_stop_strings(app: AbusedApp) -> None:
    """All of them share a prefix with the output, and one of them ends it."""
    body = {"prompt": [40, 41, 42], "max_tokens": 12, "seed": 1, "ignore_eos": True}
    text = app.complete(**body).json()["choices"][0]["text"]
    stop = [text[:5] + "\x00" * i for i in range(1, 63)] + [text[:7]]
    choice = app.complete(**body, stop=stop).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", text[:7])
    choice = app.complete(**body, stop=stop[:-1]).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, "length")


def test_bad_words_of_odd_characters(app: AbusedApp) -> None:
    for words in (*([unit] for unit in ODD), [*ODD], [" "], ["  x  "], ["a" * 200], [str(i) for i in range(500)]):
        response = app.complete(bad_words=words, temperature=0)
        assert response.status_code == 200, response.text


@pytest.mark.full
def test_all_tokens_forbidden(server: AbusedServer) -> None:
    """The request fails with an error or samples a remaining token, without delay."""
    words = [chr(code) for code in range(0x20, 0x7F)]
    for fields in (
        {"bad_words": words},
        {"bad_words": words, "min_tokens": 4},
        {"bad_words": ["a"], "allowed_token_ids": [67]},
    ):
        response = server.complete(**fields)
        assert response.status_code in (200, 422), response.text
