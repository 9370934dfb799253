"""Detokenizing as tokens come, stop strings, and the text of single tokens."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from quire.launch.text_out import MAX_HELD_TOKENS, Detokenizer, StopStrings, TextOut, TokenTexts


def cut(text: str, stop: list[str], *, include: bool = False) -> tuple[str, str | None]:
    """What TextOut must give, from the whole text: the first stop to be complete wins, the longest of a tie."""
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
    @pytest.mark.parametrize("text", ["hello world", "你好，世界。", "👩‍👩‍👧 café", "a\x00b\ufffdc", "  \n\n ", "‏שלום"])
    @pytest.mark.parametrize("size", [1, 2, 5])
    def test_text_comes_back(self, tokenizer: Tokenizer, text: str, size: int) -> None:
        ids = tokenizer.encode(text).ids
        assert stream(TextOut(tokenizer), in_parts(ids, [size])) == text

    def test_no_half_character_is_ever_sent(self, tokenizer: Tokenizer) -> None:
        ids = [tokenizer.token_to_id(char) for char in "ðŁĺĢ"]  # the four bytes of one emoji
        detokenizer = Detokenizer(tokenizer)
        assert [detokenizer.push([token]) for token in ids] == ["", "", "", "😀"]

    def test_what_is_held_back_at_the_end_is_flushed(self, tokenizer: Tokenizer) -> None:
        ids = [*tokenizer.encode("ok").ids, tokenizer.token_to_id("ð"), tokenizer.token_to_id("Ł")]
        detokenizer = Detokenizer(tokenizer)
        assert detokenizer.push(ids) + detokenizer.finish() == "ok\ufffd"

    def test_special_tokens(self, tokenizer: Tokenizer) -> None:
        ids = [1, *tokenizer.encode("hi").ids, 2]
        assert stream(TextOut(tokenizer), [ids]) == "hi"
        assert stream(TextOut(tokenizer, skip_special_tokens=False), [ids]) == "<|im_start|>hi<|im_end|>"

    def test_ids_beyond_the_vocabulary_have_no_text(self, tokenizer: Tokenizer) -> None:
        ids = [4_000, *tokenizer.encode("hi").ids, 70_000]
        assert stream(TextOut(tokenizer), [[token] for token in ids]) == "hi"

    @given(data=st.data())
    @settings(max_examples=150, deadline=None)
    def test_any_tokens_give_what_decoding_all_at_once_gives(self, tokenizer: Tokenizer, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.integers(0, 420), max_size=120))
        sizes = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
        out = TextOut(tokenizer)
        assert stream(out, in_parts(ids, sizes)) == tokenizer.decode(ids)
        assert out.num_chars == len(tokenizer.decode(ids))

    def test_endless_garbage_is_let_go(self, tokenizer: Tokenizer) -> None:
        """Bytes that never become a character must not be held, and decoded again, for ever."""
        garbage = [tokenizer.token_to_id("Ģ")] * 500
        detokenizer = Detokenizer(tokenizer)
        sent = "".join(detokenizer.push([token]) for token in garbage)
        assert len(garbage) - len(sent) <= MAX_HELD_TOKENS
        assert sent + detokenizer.finish() == tokenizer.decode(garbage)

    def test_a_stream_that_the_library_gives_up_goes_on(self) -> None:
        """With byte fallback, a byte can change the text of those before it; DecodeStream then raises."""
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

    def test_the_prompts_end_keeps_the_first_blank(self) -> None:
        """A Metaspace decoder strips the blank of whatever comes first, which an answer's first token is not."""
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

    def test_included_when_asked(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("one two three").ids
        assert stream(TextOut(tokenizer, stop=["two"], include_stop=True), [ids]) == "one two"

    def test_a_beginning_that_comes_to_nothing_is_sent(self, tokenizer: Tokenizer) -> None:
        ids = [tokenizer.token_to_id(char) for char in "aSTOa"]
        out = TextOut(tokenizer, stop=["STOP"])
        assert [out.push([token]) for token in ids] == ["a", "", "", "", "STOa"]

    def test_the_first_to_be_complete_wins_and_of_a_tie_the_longest(self) -> None:
        assert StopStrings(["abcd", "bc"]).find("xabcd") == ("bc", 4)
        assert StopStrings(["bc", "abc"]).find("xabc") == ("abc", 4)

    @given(text=st.text("ab", max_size=60), stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
    @settings(max_examples=300, deadline=None)
    def test_agrees_with_searching_the_whole_text(self, text: str, stop: list[str]) -> None:
        found = StopStrings(stop).find(text)
        expected, word = cut(text, stop, include=True)
        assert found == (None if word is None else (word, len(expected)))

    @given(data=st.data())
    @settings(max_examples=200, deadline=None)
    def test_streamed_text_is_the_whole_text_cut(self, tokenizer: Tokenizer, data: st.DataObject) -> None:
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
            # Not a token later than need be: only behind a half character is text held back.
            before = tokenizer.decode(ids[: count - 1])
            assert found not in before or before.endswith("\ufffd")


class TestTokenTexts:
    def test_bytes_are_the_tokens_own(self, tokenizer: Tokenizer) -> None:
        texts = TokenTexts(tokenizer)
        ids = tokenizer.encode("naïve 世 😀 x").ids
        assert b"".join(map(texts.raw, ids)).decode() == "naïve 世 😀 x"
        assert texts.text(tokenizer.token_to_id("ð")) == "\ufffd"
        assert texts.text(2) == "<|im_end|>"

    def test_without_text_a_token_is_its_number(self, tokenizer: Tokenizer) -> None:
        assert TokenTexts(None).text(7) == "token_id:7"
        assert TokenTexts(tokenizer).text(9_999) == "token_id:9999"


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert stream(TextOut(None, stop=["x"]), [[1, 2], [3]]) == ""
