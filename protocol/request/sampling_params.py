"""Sampling parameters and stop conditions of one request.

The struct is validated whenever it is built, and therefore also when decoded: the front end rejects an invalid field
with its name and range, and the scheduler never receives one.
"""

import operator
from collections.abc import Iterable
from typing import Any, TypeAlias

import msgspec

from quire.protocol.errors import InvalidRequest, printable, wrong_value
from quire.protocol.request.structured_outputs import RepetitionDetection, StructuredOutputs

MAX_N = 128
MAX_LOGPROBS = 20
MAX_BEAM_WIDTH = 64
MAX_BEAM_STOP_TOKENS = 64
MAX_CANDIDATES = 2 * MAX_BEAM_WIDTH
"""Most continuations of one beam that a step considers, and log probabilities of one token in a message."""
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_CHARACTERS = 8192
MAX_SALT_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_TOKENS_LIMIT = 2**31 - 1
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 65_536
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_LENGTH = 256
MAX_EXTRA_ARGS_BYTES = 65_536

ExtraArg: TypeAlias = bool | int | float | str | list[bool | int | float | str] | None


FLAGS = (
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "use_beam_search",
    "return_routed_experts",
    "return_timeline",
    "skip_reading_prefix_cache",
)
"""Fields of SamplingParams that are true or false."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling parameters of one request, with vLLM's names.

    Attributes:
        n: completions per prompt, 1 to 128. The seed of completion i is ``hash(seed, i)``.
        temperature: from 0 (greedy) to 2.
        top_p, top_k, min_p: nucleus, count and relative probability cut-offs; 1, 0 (or -1) and 0 disable them. Order:
            temperature, then top-k, then top-p, then min-p.
        seed: 64-bit; the same seed gives the same tokens independently of other requests. None: the front end draws
            one.
        stop: strings that end the output; they are removed from it unless ``include_stop_str_in_output`` is set.
        stop_token_ids: token ids that end the output, in addition to the model's end-of-text tokens.
        ignore_eos: do not stop at the model's end-of-text tokens.
        max_tokens: maximum number of output tokens; None means up to the end of the context.
        min_tokens: no stop condition applies before this number of output tokens.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens already in the output: once, and once
            per occurrence; from -2 to 2.
        repetition_penalty: positive logits of tokens in prompt and output are divided by it, negative ones multiplied
            (Keskar et al., 2019); from 0.01 to 10.
        logit_bias: token id → value added to its logit, from -100 to 100.
        allowed_token_ids: the only tokens that may be sampled.
        bad_words: texts that must not occur in the output, if tokenized in the usual way. The front end converts them
            to ``bad_words_token_ids``: the last token of each is banned after the others.
        logprobs: number of most likely tokens (0 to 20) to return with log probabilities, besides the sampled
            token; None for no log probabilities. ``--logprobs-mode`` selects the distribution.
        logprob_token_ids: up to 128 tokens to return with log probabilities instead of the most likely ones, in this
            order.
        prompt_logprobs: the same for prompt tokens except the first; such a request reuses no cached prefix.
        thinking_token_budget: maximum number of tokens between the engine's thinking markers; then the end marker is
            forced.
        structured_outputs: constraint on the output.
        repetition_detection: condition that ends a request with repetitive output.
        extra_args: arguments for logits processor plugins.
        use_beam_search: search for the ``beam_width`` most likely outputs instead of sampling. Not with ``n``,
            ``stop``, ``logprobs``, penalties, or what shapes a distribution to sample from.
        beam_width: number of outputs that each step keeps, and of the outputs returned; from 1 to 64.
        length_penalty: an output's score is the sum of its log probabilities, divided by the number of its tokens to
            this power; from -10 to 10.
        early_stopping: when the search ends. True: with ``beam_width`` complete outputs. False: when none of the kept
            ones would beat the worst of these if it ended now. "never": when none can at any length.
        return_timeline: report when the request was queued, scheduled, preempted and so on, as TimelineEvents.
        return_routed_experts: report the experts to which each position was routed; the engine must keep them.
        skip_special_tokens: leave special tokens out of the text.
        skip_reading_prefix_cache: compute the whole prompt, also what is cached of it.
        plain_spans: ranges of the prompt's tokens, which front ends set: text of a conversation in which no thinking
            marker counts, because the chat template has not written it.

    Raises:
        InvalidRequest: a value has a wrong type or is out of range; the text names the field and the range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    bad_words_token_ids: list[list[int]] = []
    prompt_logprobs: int | None = None
    thinking_token_budget: int | None = None
    structured_outputs: StructuredOutputs | None = None
    repetition_detection: RepetitionDetection | None = None
    extra_args: dict[str, ExtraArg] = {}
    use_beam_search: bool = False
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    return_routed_experts: bool = False
    return_timeline: bool = False
    skip_reading_prefix_cache: bool = False
    plain_spans: list[list[int]] = []
    logprob_token_ids: list[int] = []

    def __post_init__(self) -> None:
        check_int("n", self.n, 1, MAX_N)
        check_float("temperature", self.temperature, 0.0, 2.0)
        check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_int("top_k", self.top_k, -1, MAX_TOKENS_LIMIT)
        check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**64 - 1)
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise wrong_value(name, "true or false", getattr(self, name), "invalid_type")
        self._check_lengths()
        self._check_penalties()
        self._check_tokens()
        self._check_stops()
        self._check_structs()
        check_beams(self)

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT)
        check_int("min_tokens", self.min_tokens, 0, MAX_TOKENS_LIMIT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens, which is {self.max_tokens} (got {self.min_tokens})",
                "min_tokens",
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.thinking_token_budget is not None:
            check_int("thinking_token_budget", self.thinking_token_budget, 0, MAX_TOKENS_LIMIT)

    def _check_penalties(self) -> None:
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        # The lower bound keeps a divided logit finite in float32.
        check_float("repetition_penalty", self.repetition_penalty, 0.01, 10.0)

    def _check_tokens(self) -> None:
        """Check fields with token ids; ``check_params`` checks them against the model's vocabulary."""
        if not isinstance(self.logit_bias, dict) or len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise _wrong_entries(
                "logit_bias", f"an object of at most {MAX_LOGIT_BIAS} token ids and numbers", self.logit_bias
            )
        set_field = msgspec.structs.force_setattr
        set_field(self, "logit_bias", dict(zip(plain_ints(self.logit_bias), self.logit_bias.values(), strict=True)))
        for token, bias in self.logit_bias.items():
            check_int("each token id of logit_bias", token, 0, MAX_TOKENS_LIMIT, param="logit_bias")
            check_float("each value of logit_bias", bias, -100.0, 100.0, param="logit_bias")
        if self.allowed_token_ids is not None:
            allowed_ids = check_ids("allowed_token_ids", self.allowed_token_ids, 1, MAX_ALLOWED_TOKEN_IDS)
            set_field(self, "allowed_token_ids", allowed_ids)
            if len(set(self.allowed_token_ids)) != len(self.allowed_token_ids):
                ids = self.allowed_token_ids
                twice = next(token for at, token in enumerate(ids) if token in ids[:at])
                raise InvalidRequest(f"allowed_token_ids has {twice} more than once", "allowed_token_ids")
        if not isinstance(self.bad_words, list) or len(self.bad_words) > MAX_BAD_WORDS:
            raise _wrong_entries("bad_words", f"a list of at most {MAX_BAD_WORDS} strings", self.bad_words)
        for word in self.bad_words:
            if not isinstance(word, str) or not 1 <= len(word) <= MAX_BAD_WORD_LENGTH:
                raise InvalidRequest(
                    f"each entry of bad_words must be a string of 1 to {MAX_BAD_WORD_LENGTH} characters "
                    f"(got {printable(word)})",
                    "bad_words",
                )
        if not isinstance(self.bad_words_token_ids, list) or len(self.bad_words_token_ids) > 2 * MAX_BAD_WORDS:
            allowed = f"a list of at most {2 * MAX_BAD_WORDS} lists of token ids"
            raise _wrong_entries("bad_words_token_ids", allowed, self.bad_words_token_ids)
        if not isinstance(self.plain_spans, list):
            raise _wrong_entries("plain_spans", "a list of pairs of integers", self.plain_spans)
        set_field(self, "plain_spans", [check_ids("plain_spans", span, 2, 2) for span in self.plain_spans])
        given_ids = check_ids("logprob_token_ids", self.logprob_token_ids, 0, MAX_CANDIDATES)
        set_field(self, "logprob_token_ids", given_ids)
        words = [check_ids("bad_words_token_ids", ids, 1, MAX_BAD_WORD_LENGTH) for ids in self.bad_words_token_ids]
        set_field(self, "bad_words_token_ids", words)

    def _check_structs(self) -> None:
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise wrong_value("structured_outputs", "a StructuredOutputs", self.structured_outputs)
        if not isinstance(self.repetition_detection, RepetitionDetection | None):
            raise wrong_value("repetition_detection", "a RepetitionDetection", self.repetition_detection)
        if self.structured_outputs is not None and self.ignore_eos:
            raise InvalidRequest(
                "ignore_eos cannot be combined with structured_outputs: the constraint ends the output", "ignore_eos"
            )
        if self.extra_args == {}:
            return
        try:
            good = (
                isinstance(self.extra_args, dict) and msgspec.convert(self.extra_args, dict[str, ExtraArg]) is not None
            )
            good = good and len(msgspec.msgpack.encode(self.extra_args)) <= MAX_EXTRA_ARGS_BYTES
        except (msgspec.ValidationError, TypeError, ValueError, OverflowError, RecursionError):
            good = False
        if not good:
            allowed = "an object of strings, numbers, booleans or flat lists of them, of at most "
            allowed += f"{MAX_EXTRA_ARGS_BYTES} bytes"
            raise wrong_value("extra_args", allowed, self.extra_args)

    def _check_stops(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", [self.stop])
        if not isinstance(self.stop, list) or len(self.stop) > MAX_STOP_STRINGS:
            raise _wrong_entries("stop", f"a string or a list of at most {MAX_STOP_STRINGS} strings", self.stop)
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise InvalidRequest(
                    f"each entry of stop must be a string of 1 to {MAX_STOP_LENGTH} characters (got {printable(text)})",
                    "stop",
                )
        if (size := sum(map(len, self.stop))) > MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"all entries of stop together must have at most {MAX_STOP_CHARACTERS} characters (got {size})", "stop"
            )
        if not isinstance(self.stop_token_ids, list) or len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise _wrong_entries(
                "stop_token_ids", f"a list of at most {MAX_STOP_TOKEN_IDS} token ids", self.stop_token_ids
            )
        ids = [check_int("stop_token_ids", token, 0, MAX_TOKENS_LIMIT) for token in plain_ints(self.stop_token_ids)]
        msgspec.structs.force_setattr(self, "stop_token_ids", ids)

    def named_token_ids(self) -> dict[str, list[int]]:
        """Return, by field, the token ids in it, all of which the model's vocabulary must have."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": list(self.logit_bias),
            "allowed_token_ids": self.allowed_token_ids or [],
            "bad_words_token_ids": [token for word in self.bad_words_token_ids for token in word],
            "logprob_token_ids": self.logprob_token_ids,
        }

    @property
    def num_outputs(self) -> int:
        """Number of outputs for a prompt."""
        return self.beam_width or self.n

    @property
    def num_candidates(self) -> int | None:
        """Number of tokens that the workers report beside the sampled one: for log probabilities or beams. None: none.

        For beams twice their width, and at least 8 more than it: all beams can continue in a step in which each of the
        best tokens is one of up to 8 stop tokens.
        """
        if self.beam_width is None:
            return len(self.logprob_token_ids) or self.logprobs
        return min(max(2 * self.beam_width, self.beam_width + 8), MAX_CANDIDATES)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


def check_beams(params: SamplingParams) -> None:
    """Raise InvalidRequest unless the parameters of a beam search are valid, and used by one."""
    check_float("length_penalty", params.length_penalty, -10.0, 10.0)
    if not (isinstance(params.early_stopping, bool) or params.early_stopping == "never"):
        raise wrong_value("early_stopping", 'true, false or "never"', params.early_stopping)
    if not params.use_beam_search:
        for name, unset in (("beam_width", None), ("length_penalty", 1.0), ("early_stopping", False)):
            if (value := getattr(params, name)) != unset:
                text = f"{name} is a parameter of beam search: it needs use_beam_search (got {printable(value)})"
                raise InvalidRequest(text, name)
        return
    check_int("beam_width with use_beam_search", params.beam_width, 1, MAX_BEAM_WIDTH, param="beam_width")
    for name, neutral in _NOT_WITH_BEAMS.items():
        if (value := getattr(params, name)) not in neutral:
            allowed = " or ".join(map(str, neutral))
            text = f"{name} must be {allowed} with use_beam_search (got {printable(value)})"
            raise InvalidRequest(text, name, "unsupported_value")
    allowed_ids = params.allowed_token_ids
    if allowed_ids is not None and len(allowed_ids) < (params.beam_width or 0):
        text = f"allowed_token_ids must have at least beam_width={params.beam_width} token ids with use_beam_search"
        raise InvalidRequest(f"{text} (got {len(allowed_ids)})", "allowed_token_ids")
    if len(params.stop_token_ids) > MAX_BEAM_STOP_TOKENS:
        text = f"stop_token_ids must have at most {MAX_BEAM_STOP_TOKENS} token ids with use_beam_search"
        raise InvalidRequest(f"{text} (got {len(params.stop_token_ids)})", "stop_token_ids")


_NOT_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "temperature": (0.0, 1.0),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "stop": ([],),
    "logprobs": (None,),
    "logprob_token_ids": ([],),
    "prompt_logprobs": (None,),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "extra_args": ({},),
    "return_routed_experts": (False,),
    "return_timeline": (False,),
}
"""The values that these parameters may have in a beam search, which does not sample."""


def check_int(name: str, value: Any, low: int, high: int, *, param: str | None = None) -> int:
    """Return ``value`` if it is an integer (a bool is not) from ``low`` to ``high``.

    ``param``: field reported in the error, if it is not ``name``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be an integer from {low} to {high} (got {printable(value)})", param or name)
    return value


def check_ids(name: str, value: Any, least: int, most: int) -> list[int]:
    """Return ``value`` if it is a list of ``least`` to ``most`` non-negative integers, as ints."""
    good = isinstance(value, list) and least <= len(value) <= most
    ids = plain_ints(value) if good else []
    if not good or not all(type(token) is int and 0 <= token <= MAX_TOKENS_LIMIT for token in ids):
        raise _wrong_entries(name, f"a list of {least} to {most} token ids", value)
    return ids


def plain_ints(values: Iterable[Any]) -> list[Any]:
    """Return the values, with integers of other libraries, such as NumPy's, as ints."""
    return [each if type(each) is int else _plain_int(each) for each in values]


def _plain_int(value: Any) -> Any:
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def _wrong_entries(name: str, allowed: str, value: Any) -> InvalidRequest:
    """Return the error for a collection of a wrong size, or another type."""
    given = f"{len(value)} entries" if isinstance(value, list | dict) else printable(value)
    return InvalidRequest(f"{name} must be {allowed} (got {given})", name)


def check_float(
    name: str, value: Any, low: float, high: float, *, open_low: bool = False, param: str | None = None
) -> float:
    """Return ``value`` if it is a finite number (a bool is not) from ``low`` to ``high``; ``param`` as in
    ``check_int``.
    """
    # NaN fails the range check. ``math.isfinite`` raises OverflowError for an integer larger than any float.
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not low <= value <= high or (open_low and value == low):
        edge = f"above {low:g} and at most" if open_low else f"from {low:g} to"
        raise InvalidRequest(f"{name} must be a number {edge} {high:g} (got {printable(value)})", param or name)
    return float(value)


def seed_for_sample(seed: int, sample: int) -> int:
    """Return the 64-bit seed of completion ``sample`` of a prompt, by SplitMix64 (Steele et al., 2014).

    Sample 0 is hashed as well, so that n = 1 and the first completion of n = 4 are the same text.
    """
    mask = (1 << 64) - 1
    z = ((seed & mask) + 0x9E3779B97F4A7C15 * (sample + 1)) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
