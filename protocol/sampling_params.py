"""How one request wants its tokens chosen, and when to stop.

The struct is checked whenever it is built, so also when it is decoded: the front end refuses a bad field with
its name and range, and a scheduler never sees one.
"""

import math
from typing import Any

import msgspec

from quire.protocol.errors import InvalidRequest

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_TOKENS_LIMIT = 2**31 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One request's sampling, by the names vLLM's users know.

    Attributes:
        n: answers per prompt, 1 to 128. Sample i of a request draws with ``hash(seed, i)``.
        temperature: 0 is greedy; from 0 to 2.
        top_p, top_k, min_p: nucleus, count and relative-probability cuts; 1, 0 and 0 switch them off (so does
            ``top_k=-1``). Order: temperature, then top-k, then top-p, then min-p.
        seed: 64-bit; the same seed gives the same tokens whatever else runs. None: drawn by the front end.
        stop: strings that end the answer; they are cut off unless ``include_stop_str_in_output``.
        stop_token_ids: ids that end the answer, besides the model's own end of text.
        ignore_eos: do not end at the model's end of text.
        max_tokens: most tokens to generate; None means up to the context's end.
        logprobs: log probabilities of the sampled token and of this many best ones (0 to 20); None for none.
            They are of the model's raw distribution, before temperature and cuts.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        InvalidRequest: a value is of the wrong type or out of range; names the field and the range.
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

    def __post_init__(self) -> None:
        check_int("n", self.n, 1, MAX_N)
        check_float("temperature", self.temperature, 0.0, 2.0)
        check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_int("top_k", self.top_k, -1, MAX_TOKENS_LIMIT)
        check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false", name, "invalid_type")
        self._check_stops()

    def _check_stops(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", [self.stop])
        if not isinstance(self.stop, list) or len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop must be a string or a list of at most {MAX_STOP_STRINGS} strings", "stop")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise InvalidRequest(f"each stop must be a string of 1 to {MAX_STOP_LENGTH} characters", "stop")
        if not isinstance(self.stop_token_ids, list) or len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids must be a list of at most {MAX_STOP_TOKEN_IDS} token ids", "stop_token_ids"
            )
        for token in self.stop_token_ids:
            check_int("stop_token_ids", token, 0, MAX_TOKENS_LIMIT)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def check_int(name: str, value: Any, low: int, high: int) -> int:
    """Return ``value`` if it is an integer (a bool is not) from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be an integer from {low} to {high}", name)
    return value


def check_float(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    """Return ``value`` if it is a finite number (a bool is not) from ``low`` to ``high``."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high or (open_low and value == low):
        edge = f"above {low:g} and at most" if open_low else f"from {low:g} to"
        raise InvalidRequest(f"{name} must be a number {edge} {high:g}", name)
    return float(value)


def seed_for_sample(seed: int, sample: int) -> int:
    """The 64-bit seed of answer ``sample`` of a request: ``hash(seed, i)`` by SplitMix64 (Steele et al., 2014).

    Sample 0 keeps its own hash too, so that n = 1 and the first of n = 4 are the same text.
    """
    mask = (1 << 64) - 1
    z = ((seed & mask) + 0x9E3779B97F4A7C15 * (sample + 1)) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
