"""Malicious tokenizer files: the start fails with one line, or only the requests that are slow wait."""

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from grammar_cases import DEMO

from quire.frontend.http.serving.work_threads import TextThreads
from quire.frontend.text import text_in as texts
from quire.frontend.text import tokenizer_checks
from quire.frontend.text.text_in import TextIn
from quire.frontend.text.tokenizer_checks import MAX_TOKEN_ID
from quire.protocol.errors import ConfigError, InvalidRequest


def written(folder: Path, **fields: Any) -> Path:
    """Write the demo model's tokenizer with other fields; return its folder."""
    file = json.loads((DEMO / "tokenizer.json").read_text()) | fields
    (folder / "tokenizer.json").write_text(json.dumps(file))
    return folder


def with_id(folder: Path, token_id: int) -> Path:
    model = json.loads((DEMO / "tokenizer.json").read_text())["model"]
    return written(folder, model=model | {"vocab": model["vocab"] | {"\x1b[31mzz": token_id}})


def doubled(char: str, times: int) -> dict[str, Any]:
    """Return a normalizer, or decoder, that replaces ``char`` by ``2**times`` of it."""
    step = {"type": "Replace", "pattern": {"String": char}, "content": char * 2}
    return {"type": "Sequence", "normalizers": [step] * times, "decoders": [{"type": "Fuse"}] + [step] * times}


def split_at(regex: str) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, byte_level]}


@pytest.mark.parametrize("token_id", [MAX_TOKEN_ID + 1, 10**9, 2**32 - 1])
def test_huge_token_id_is_refused(tmp_path: Path, token_id: int) -> None:
    with pytest.raises(ConfigError, match=rf"tokenizer.json: token ids must be between 0 and {MAX_TOKEN_ID} ") as error:
        TextIn.load(with_id(tmp_path, token_id))
    assert f"got {token_id}" in str(error.value) and "\x1b" not in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"normalizer": doubled("e", 19)},
        {"normalizer": doubled(" ", 19)},
        {"decoder": doubled("e", 19)},
        {"pre_tokenizer": split_at(r"([a-z]|[^0-9])+?(?=\d{9})")},
    ],
    ids=["letters multiply", "spaces multiply", "letters multiply in the output", "a slow expression"],
)
def test_tokenizer_that_is_slow_for_ordinary_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(tokenizer_checks, "TRIAL_SECONDS", 0.01)
    with pytest.raises(ConfigError, match=r"tokenizer.json: the tokenizer needs more than 0.01 s or 1 GiB"):
        TextIn.load(written(tmp_path, **fields))


def test_tokenizer_that_is_slow_for_one_text_does_not_stop_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The trial cannot find every trigger. After the first slow text, all are processed in threads."""
    monkeypatch.setattr(texts, "SLOW_SECONDS", 0.004)
    text_in = TextIn.load(written(tmp_path, normalizer=doubled("\N{SNOWMAN}", 15)))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert len(text_in.encode("\N{SNOWMAN}")) >= 2**15
    assert text_in.is_slow and caplog.text.count("the tokenizer is slow") == 1

    async def longest_pause() -> float:
        work = asyncio.create_task(TextThreads(text_in).run(1, lambda: text_in.encode("\N{SNOWMAN}")))
        longest, last = 0.0, time.monotonic()
        while not work.done():
            await asyncio.sleep(0)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        return longest

    began = time.monotonic()
    pause = asyncio.run(longest_pause())
    assert pause < (time.monotonic() - began) / 2


def test_usual_tokenizer_passes_the_trial() -> None:
    text_in = TextIn.load(DEMO)
    assert not text_in.is_slow and text_in.encode("hello")
    with pytest.raises(InvalidRequest):
        text_in.encode("\ud800")
    text_in.close()
