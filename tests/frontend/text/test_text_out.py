"""Incremental detokenization, stop strings, and the text of single tokens."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples
from tokenizers import Tokenizer

from quire.frontend.engine.answers import Answer
from quire.frontend.engine.update import Update
from quire.frontend.text.parsing.choose_format import marker_format
from quire.frontend.text.parsing.thoughts import Thoughts
from quire.frontend.text.prompts import Prompt
from quire.frontend.text.text_in import TextIn
from quire.frontend.text.text_out import MAX_HELD_TOKENS, Detokenizer, StopStrings, TextOut, TokenTexts
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.front_end_messages import EndReason
from quire.protocol.wire.logprobs import TokenLogprobs


def cut(text: str, stop: list[str], *, include: bool = False) -> tuple[str, str | None]:
    """Return the expected text of TextOut from the whole text: cut at the first complete stop, the longest of a tie."""
    ends = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
    if not ends:
        return text, None
    end, _, found = min(ends)
    return text[: end if include else end - len(found)], found


def in_parts(ids: list[int], sizes: list[int]) -> list[list[int]]:
    parts, place = [], 0
    while place < len(ids):
        size = sizes[len(parts) % len(sizes)]
        parts.append(ids[place : place + size])
        place += size
    return parts


def stream(out: TextOut, parts: list[list[int]]) -> str:
    return "".join(out.push(part) for part in parts) + out.finish()


class TestDetokenizer:
    def test_incomplete_characters_are_held_back(self, tokenizer: Tokenizer) -> None:
        ids = [tokenizer.token_to_id(char) for char in "ðŁĺĢ"]  # the four bytes of an emoji
        detokenizer = Detokenizer(tokenizer)
        assert [detokenizer.push([token]) for token in ids] == ["", "", "", "😀"]

    def test_special_tokens(self, tokenizer: Tokenizer) -> None:
        ids = [1, *tokenizer.encode("hi").ids, 2]
        assert stream(TextOut(tokenizer), [ids]) == "hi"
        assert stream(TextOut(tokenizer, skip_special_tokens=False), [ids]) == "<|im_start|>hi<|im_end|>"

    def test_ids_beyond_the_vocabulary_have_no_text(self, tokenizer: Tokenizer) -> None:
        ids = [4_000, *tokenizer.encode("hi").ids, 70_000]
        assert stream(TextOut(tokenizer), [[token] for token in ids]) == "hi"

    @given(data=st.data())
    @settings(max_examples=examples(150), deadline=None)
    def test_incremental_decoding_equals_decoding_at_once(self, tokenizer: Tokenizer, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.integers(0, 420), max_size=120))
        sizes = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
        out = TextOut(tokenizer)
        assert stream(out, in_parts(ids, sizes)) == tokenizer.decode(ids)
        assert out.num_chars == len(tokenizer.decode(ids))

    def test_invalid_bytes_are_released(self, tokenizer: Tokenizer) -> None:
        """Bytes that never become a character must not be held and decoded again forever."""
        garbage = [tokenizer.token_to_id("Ģ")] * 500
        detokenizer = Detokenizer(tokenizer)
        sent = "".join(detokenizer.push([token]) for token in garbage)
        assert len(garbage) - len(sent) <= MAX_HELD_TOKENS
        assert sent + detokenizer.finish() == tokenizer.decode(garbage)

    def test_continues_after_decode_stream_raises(self) -> None:
        """With byte fallback, a byte can change the text of earlier bytes; DecodeStream then raises."""
        pieces = ["<0xE4>", "<0xB8>", "<0xAD>", "a", "▁b"]
        vocab = [["<unk>", 0.0], *[[piece, -1.0] for piece in pieces]]
        decoder = {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        }
        model = {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": True}
        made = Tokenizer.from_str(json.dumps({"version": "1.0", "model": model, "decoder": decoder}))
        out = TextOut(made)
        text = "".join(out.push([token]) for token in [1, 2, 3, 1, 4, 5]) + out.finish()
        assert text.startswith("中")
        assert text.endswith("a b")
        assert TokenTexts(made).raw(1) == b"\xe4"
        assert TokenTexts(made).text(5) == " b"

    def test_the_prompt_tail_keeps_the_first_blank(self) -> None:
        """A Metaspace decoder strips the blank of the first token, but an answer's first token follows the prompt."""
        vocab = [["<unk>", 0.0], ["▁hi", -1.0], ["▁you", -1.0]]
        model = {"type": "Unigram", "unk_id": 0, "vocab": vocab}
        decoder = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
        made = Tokenizer.from_str(json.dumps({"version": "1.0", "model": model, "decoder": decoder}))
        assert stream(TextOut(made), [[2]]) == "you"
        assert stream(TextOut(made, prompt_tail=[1]), [[2]]) == " you"


class TestStopStrings:
    def test_across_token_boundaries(self, tokenizer: Tokenizer) -> None:
        ids = [tokenizer.token_to_id(char) for char in "abcSTOPxyz"]
        out = TextOut(tokenizer, stop=["STOP"])
        assert [out.push([token]) for token in ids] == ["a", "b", "c", "", "", "", "", "", "", ""]
        assert out.stop is not None
        assert (out.stop.text, out.stop.num_output_tokens) == ("STOP", 7)
        assert out.finish() == ""

    @given(text=st.text("ab", max_size=60), stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
    @settings(max_examples=examples(300), deadline=None)
    def test_agrees_with_searching_the_whole_text(self, text: str, stop: list[str]) -> None:
        found = StopStrings(stop).find(text)
        expected, word = cut(text, stop, include=True)
        assert found == (None if word is None else (word, len(expected)))

    @given(data=st.data())
    @settings(max_examples=examples(200), deadline=None)
    def test_streamed_text_equals_the_whole_text_cut(self, tokenizer: Tokenizer, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.integers(3, 330), max_size=40))
        whole = tokenizer.decode(ids)
        places = st.integers(0, max(0, len(whole) - 1))
        inside = st.builds(lambda a, n: whole[a : a + n], places, st.integers(1, 6)).filter(bool)
        random = st.text(min_size=1, max_size=4)
        stop = data.draw(st.lists(st.one_of(inside, random) if whole else random, max_size=4))
        include = data.draw(st.booleans())
        sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        out = TextOut(tokenizer, stop=stop, include_stop=include)
        longest = max(map(len, stop), default=1)
        sent = ""
        for part in in_parts(ids, sizes):
            sent += out.push(part)
            if out.stop is None:
                assert out.num_chars - len(sent) <= longest - 1
        sent += out.finish()
        expected, found = cut(whole, stop, include=include)
        assert sent == expected
        assert (out.stop.text if out.stop else None) == found
        if out.stop:
            count = out.stop.num_output_tokens
            assert found in tokenizer.decode(ids[:count])
            # Text is held back only behind an incomplete character, so no token is sent later than necessary.
            before = tokenizer.decode(ids[: count - 1])
            assert found not in before or before.endswith("\ufffd")

    @given(data=st.data())
    @settings(max_examples=examples(200), deadline=None)
    def test_no_stop_within_min_tokens(self, tokenizer: Tokenizer, data: st.DataObject) -> None:
        """A stop string counts if a token after ``min_tokens`` completes it, even if it begins before."""
        ids = data.draw(st.lists(st.sampled_from([tokenizer.token_to_id(char) for char in "ab"]), max_size=30))
        stop = data.draw(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
        least = data.draw(st.integers(0, 12))
        include = data.draw(st.booleans())
        sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        whole = tokenizer.decode(ids)
        ends = [(end, -len(s), s) for s in stop for end in range(least + 1, len(whole) + 1) if whole[:end].endswith(s)]
        end, _, found = min(ends, default=(len(whole), 0, None))
        out = TextOut(tokenizer, stop=stop, include_stop=include, min_tokens=least)
        sent = stream(out, in_parts(ids, sizes))
        assert sent == (whole[:end] if found is None or include else whole[: end - len(found)])
        assert out.stop is None if found is None else out.stop is not None and out.stop.text == found
        assert out.stop is None or out.stop.num_output_tokens == end > least

    def test_thoughts_are_not_held_back(self, tokenizer: Tokenizer) -> None:
        ids = [tokenizer.token_to_id(char) for char in "aSTOPb"]
        out = TextOut(tokenizer, stop=["STOP"], thoughts=lambda: Thoughts(marker_format("(", ")"), "("))
        assert [out.push([token]) for token in ids] == [*"aSTOPb"]
        assert stream(out, [[tokenizer.token_to_id(char)] for char in ")xSTOP"]) == ")x"


class TestAnswers:
    """Updates to deltas: text, finish reason and counts do not depend on how the tokens are split into updates."""

    @given(data=st.data())
    @settings(max_examples=examples(80), deadline=None)
    def test_any_split_into_updates_gives_the_same_answer(
        self, tokenizer: Tokenizer, text_in: TextIn, data: st.DataObject
    ) -> None:
        ids = data.draw(st.lists(st.integers(3, 330), min_size=1, max_size=30))
        text = tokenizer.decode(ids)
        inside = st.builds(lambda a, n: text[a : a + n], st.integers(0, len(text)), st.integers(1, 4)).filter(bool)
        params = SamplingParams(
            stop=data.draw(st.lists(inside, max_size=2)) if text else [],
            min_tokens=data.draw(st.integers(0, 8)),
            include_stop_str_in_output=data.draw(st.booleans()),
            logprobs=data.draw(st.sampled_from([None, 0])),
            max_tokens=40,
        )
        ended = data.draw(st.sampled_from([EndReason.STOPPED, EndReason.LENGTH, EndReason.REPETITION]))
        sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
        cut, stops = assemble(text_in, params, in_parts(ids, sizes), ended)
        whole, _ = assemble(text_in, params, [ids], ended)
        assert cut == whole
        # The engine is sent a stop only if it has not ended the answer itself.
        by_string = isinstance(cut[2], str)
        assert stops in ([], [cut[3]])
        if stops:
            assert by_string
        elif by_string:
            # The last update contained the stop string, or released held text that completed it.
            assert cut[3] > len(ids) - len(in_parts(ids, sizes)[-1]) or "\ufffd" in tokenizer.decode(ids[: cut[3]])
        if not by_string:
            assert (cut[1], cut[3]) == (ended.finish_reason, len(ids))

    @pytest.mark.parametrize("reason", list(EndReason))
    def test_every_end_reason(self, text_in: TextIn, reason: EndReason) -> None:
        answer, _ = assemble(text_in, SamplingParams(max_tokens=9), [[5, 6], [7]], reason)
        assert answer[1:] == (reason.finish_reason, None, 3, None)


class Recorder:
    """A sequence that records the calls to it."""

    request_id = "a"

    def __init__(self) -> None:
        self.stops: list[int] = []

    def stop_at(self, num_output_tokens: int) -> None:
        self.stops.append(num_output_tokens)

    def abort(self) -> None:
        raise AssertionError("unexpected abort")


Assembled = tuple[str, str | None, int | str | None, int, list[tuple[int, int]] | None]


def assemble(
    text_in: TextIn, params: SamplingParams, parts: list[list[int]], ended: EndReason
) -> tuple[Assembled, list[int]]:
    """Return one answer's text, finish reason, stop reason, number of tokens, tokens with offsets; and its stops."""
    sequence = Recorder()
    answer = Answer(sequence, text_in, Prompt(np.array([5], np.int32)), params)
    texts: list[str] = []
    placed: list[tuple[int, int]] | None = None if params.logprobs is None else []
    total = 0
    for i, part in enumerate(parts):
        total += len(part)
        logprobs = None if params.logprobs is None else [TokenLogprobs(t, -1.0, 1, []) for t in part]
        last = ended if i == len(parts) - 1 else None
        delta = answer.assemble(Update(list(part), logprobs, last, None, total))
        texts.append(delta.text)
        if placed is not None and delta.logprobs is not None:
            placed += [(entry.logprobs.token_id, entry.text_offset) for entry in delta.logprobs]
        if delta.finish_reason is not None:
            break
    return ("".join(texts), delta.finish_reason, delta.stop_reason, delta.num_output_tokens, placed), sequence.stops


class TestTokenTexts:
    def test_raw_bytes_of_single_tokens(self, tokenizer: Tokenizer) -> None:
        texts = TokenTexts(tokenizer)
        ids = tokenizer.encode("naïve 世 😀 x").ids
        assert b"".join(map(texts.raw, ids)).decode() == "naïve 世 😀 x"
        assert texts.text(tokenizer.token_to_id("ð")) == "\ufffd"
        assert texts.text(2) == "<|im_end|>"

    def test_a_token_without_text_is_shown_as_its_id(self, tokenizer: Tokenizer) -> None:
        assert TokenTexts(None).text(7) == "token_id:7"
        assert TokenTexts(tokenizer).text(9_999) == "token_id:9999"


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert stream(TextOut(None, stop=["x"]), [[1, 2], [3]]) == ""
