"""Texts that are long or hard to tokenize: the work is bounded, and other threads are not blocked."""

import threading
from typing import Any

import numpy as np
import pytest
from tiers import thinned
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from quire.frontend.http.app import make_app
from quire.frontend.http.serving.body import CONTAINER_WEIGHT, MAX_BODY_WEIGHT, TEXT_WEIGHT, parse_body
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.text.chat_template import ChatTemplate
from quire.frontend.text.prompts import (
    MAX_ANSWER_LOGPROBS,
    MAX_PROMPT_LOGPROBS,
    MAX_SUBMITTED_TOKENS,
    Prompt,
    check_volume,
)
from quire.frontend.text.text_in import ChatOptions, TextIn
from quire.frontend.text.text_out import StopStrings
from quire.protocol.errors import InvalidRequest
from quire.protocol.request.sampling_params import SamplingParams

MESSAGE_TEMPLATE = ChatTemplate("{{ messages[0].content }}", {}, "test")


class CountingTokenizer:
    """A tokenizer that counts the characters passed to it."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner
        self.num_chars = 0

    def encode(self, text: str, **options: Any) -> Any:
        self.num_chars += len(text)
        return self._inner.encode(text, **options)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.num_chars += sum(map(len, texts))
        return self._inner.encode_batch_fast(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture
def with_a_long_token(tokenizer: Tokenizer) -> CountingTokenizer:
    """Has one token of 300 characters, so that the longest token is a weak bound of the characters that fit."""
    made = Tokenizer.from_str(tokenizer.to_str())
    made.add_tokens(["z" * 300])
    return CountingTokenizer(made)


class TestTooLong:
    CONTEXT = 1000

    @pytest.mark.parametrize("times", thinned([2, 10, 29], keep=1))
    @pytest.mark.parametrize("unit", ["hello ", "a", " ", "😀", "\x00", "x y z, "])
    def test_only_a_prefix_is_tokenized(self, with_a_long_token: CountingTokenizer, unit: str, times: int) -> None:
        text_in = TextIn(with_a_long_token, MESSAGE_TEMPLATE)  # type: ignore[arg-type]
        text = unit * (times * self.CONTEXT * 10 // len(unit))
        for encode in (
            lambda: text_in.encode(text, max_tokens=self.CONTEXT),
            lambda: text_in.encode_chat([{"role": "user", "content": text}], ChatOptions(), self.CONTEXT),
        ):
            with_a_long_token.num_chars = 0
            with pytest.raises(InvalidRequest, match="maximum context length is 1000 tokens") as caught:
                encode()
            assert caught.value.code == "context_length_exceeded"
            assert 0 < with_a_long_token.num_chars <= 16 * self.CONTEXT

    def test_a_long_text_that_fits_is_accepted(self, with_a_long_token: CountingTokenizer) -> None:
        text_in = TextIn(with_a_long_token)  # type: ignore[arg-type]
        long_token = with_a_long_token.token_to_id("z" * 300)
        for num_tokens in (1, 55, 500, 999):
            with_a_long_token.num_chars = 0
            assert text_in.encode("z" * 300 * num_tokens, max_tokens=self.CONTEXT) == [long_token] * num_tokens
            # Prefixes first, each four times longer than the previous one, then the whole text.
            assert with_a_long_token.num_chars <= 2.4 * 300 * num_tokens

    def test_the_prefix_check_refuses_no_borderline_text(self, tokenizer: Tokenizer) -> None:
        text_in = TextIn(tokenizer)
        for length in range(990, 1010):
            assert text_in.encode("\x00" * length, max_tokens=self.CONTEXT) == text_in.encode("\x00") * length


class TestOtherThreads:
    def test_tokenizing_a_long_text_releases_the_interpreter_lock(self, text_in: TextIn) -> None:
        """While one thread holds the interpreter lock, another thread cannot run at all."""
        ticks, over = [0], threading.Event()

        def tick() -> None:
            while not over.wait(0.001):
                ticks[0] += 1

        thread = threading.Thread(target=tick)
        thread.start()
        before = ticks[0]
        text_in.encode("hello there " * 25_000)
        during = ticks[0] - before
        over.set()
        thread.join()
        assert during > 5

    def test_long_texts_have_the_same_tokens(self, text_in: TextIn, tokenizer: Tokenizer) -> None:
        for unit in ("hello there ", "é😀 ", "a", "<|im_end|>x", " ", "\n", "👩‍👩‍👧", "\x00", "\ufffd", "‏"):
            text = unit * 2000
            assert text_in.encode(text) == tokenizer.encode(text).ids
            assert text_in.decode(text_in.encode(text), skip_special_tokens=False) == text


@pytest.fixture
def with_a_hard_regex() -> Tokenizer:
    """Has a regex that takes exponential time, until the library panics with something other than an Exception."""
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("(a+)+$"), "isolated"), byte_level])
    return made


@pytest.mark.parametrize("text", thinned(["a" * 40 + "!", "a" * 20_000 + "!"], keep=1))
def test_a_tokenizer_panic_fails_one_request(client: Any, engine: Any, with_a_hard_regex: Tokenizer, text: str) -> None:
    engine.max_model_len, engine.reply = 2**16, None
    settings = ServerSettings(text_in=TextIn(with_a_hard_regex, MESSAGE_TEMPLATE), served_model_names=("tiny",))
    http = type(client)(make_app(engine, settings))
    for response, param in (
        (http.complete(prompt=text), "prompt"),
        (http.complete(bad_words=[text[-200:]]), "bad_words"),
        (http.post("/tokenize", {"prompt": text}), "prompt"),
        (http.chat(messages=[{"role": "user", "content": text}]), None),
    ):
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "the text cannot be tokenized"
        assert param is None or response.json()["error"]["param"] == param
        assert http.complete(prompt="hello").status_code == 200


class TestVolume:
    def volume(self, lengths: list[int], n: int, **fields: Any) -> None:
        prompts = [Prompt(np.zeros(length, np.int32)) for length in lengths]
        check_volume([SamplingParams(**fields)] * len(lengths), prompts, n)

    @pytest.mark.parametrize("n", thinned([1, 2, 16, 128], keep=2))
    @pytest.mark.parametrize("num_prompts", [1, 3])
    def test_each_product_up_to_its_bound(self, n: int, num_prompts: int) -> None:
        each = MAX_SUBMITTED_TOKENS // n // num_prompts
        self.volume([each] * num_prompts, n)
        with pytest.raises(InvalidRequest, match="all prompts times n must be at most") as caught:
            self.volume([each + num_prompts] * num_prompts, n)
        assert caught.value.param == "n"

    @pytest.mark.parametrize("best", [0, 1, 20])
    @pytest.mark.parametrize("n", [1, 128])
    def test_log_probabilities(self, n: int, best: int) -> None:
        each = MAX_PROMPT_LOGPROBS // n // (best + 1)
        self.volume([each], n, prompt_logprobs=best)
        with pytest.raises(InvalidRequest, match="prompt_logprobs") as caught:
            self.volume([each + 1], n, prompt_logprobs=best)
        assert caught.value.param == "prompt_logprobs"
        most = MAX_ANSWER_LOGPROBS // n // (best + 1)
        self.volume([1], n, logprobs=best, max_tokens=most)
        with pytest.raises(InvalidRequest, match="logprobs") as caught:
            self.volume([1], n, logprobs=best, max_tokens=most + 1)
        assert caught.value.param == "logprobs"

    def test_logprobs_that_are_not_requested_do_not_count(self) -> None:
        self.volume([MAX_PROMPT_LOGPROBS * 2], 1, max_tokens=MAX_ANSWER_LOGPROBS * 2)


class TestValues:
    """Bodies are refused by the number of their values, not by their size."""

    @staticmethod
    def refused(body: bytes) -> bool:
        try:
            parse_body(body, lambda raw: raw)
        except InvalidRequest as error:
            return "too many values" in error.message
        return False

    @pytest.mark.parametrize(
        "inside", ["{}", '"x":[{}],"y":"%s"', '"x":"%s","y":[{}]', '"%s":[{}]', '"x":"%s\\\\","y":[{}]', '"\\"%s":[{}]']
    )
    @pytest.mark.parametrize("text", thinned(["", ",", "[", "{", '\\"', "\\\\", ',\\"[', "\\n,{", "é,"], keep=3))
    def test_text_length_does_not_count(self, inside: str, text: str) -> None:
        many = text * 10_000
        within = inside % many if "%s" in inside else f'"a":[{inside}]'
        body = ("{" + within + "}").replace("{}", ",".join("1" * 10)).encode()
        assert not self.refused(body)
        longer = ("{" + within + "}").replace("{}", ",".join("1" * (MAX_BODY_WEIGHT + 5))).encode()
        assert self.refused(longer)

    @pytest.mark.full
    @pytest.mark.parametrize(("value", "weight"), [("1", 1), ('""', 5), ("[]", 17), ("{}", 17), ('{"":1}', 21)])
    def test_the_last_allowed_value(self, value: str, weight: int) -> None:
        """Each value has a comma."""
        beside = 2 * CONTAINER_WEIGHT + TEXT_WEIGHT
        most = (MAX_BODY_WEIGHT - beside + 1) // weight
        assert not self.refused(f'{{"a":[{",".join([value] * most)}]}}'.encode())
        assert self.refused(f'{{"a":[{",".join([value] * (most + 1))}]}}'.encode())


class TestManyStops:
    def test_work_does_not_grow_with_the_number_of_stop_strings(self) -> None:
        """Counts look-ups, not seconds: per character one step forward, and back at most the steps before."""
        stop = ["a" * length for length in range(100, 164)]
        stops = StopStrings(stop)
        lookups = 0

        class CountedEdges(dict[int, int]):
            def get(self, key: int, default: Any = None) -> Any:
                nonlocal lookups
                lookups += 1
                return super().get(key, default)

        edges, *others = stops._automaton.tables
        stops._automaton.tables = (CountedEdges(edges), *others)  # type: ignore[assignment]
        text = ("a" * 99 + "b") * 50
        assert stops.find(text) is None
        assert len(text) <= lookups <= 2 * len(text)
