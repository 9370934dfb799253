"""The log probabilities that questions need, and the answers that follow from them."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from quire.frontend.text.decisions.questions import Answer, Question
from quire.frontend.text.prompts import Prompt
from quire.protocol.errors import InvalidRequest
from quire.protocol.request.sampling_params import MAX_CANDIDATES, SamplingParams
from quire.protocol.wire.logprobs import TokenLogprobs

MAX_READS = 16_384
"""Most positions at which one request reads the model's distribution."""

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """A question as tokens, and what has been read for it.

    Attributes:
        where: path of the question in the request.
        answers: the tokens of each allowed answer, as the model is to write it.
        logprobs: of the last token of each beginning of an answer.
    """

    question: Question
    where: str
    prompt: Prompt
    answers: list[Tokens]
    logprobs: dict[Tokens, float] = field(default_factory=dict)

    def reads(self) -> Iterator["Read"]:
        """Yield what must be read, before ``answer``."""
        following: dict[Tokens, dict[int, None]] = {}
        for tokens in self.answers:
            for length, token in enumerate(tokens):
                following.setdefault(tokens[:length], {})[token] = None
        for path, found in following.items():
            ids = [*found]
            for begin in range(0, len(ids), MAX_CANDIDATES):
                yield Read(self, path, ids[begin : begin + MAX_CANDIDATES])

    def answer(self) -> Answer:
        """Return the answer.

        The probability of an allowed answer is that of its whole token sequence: the product of those of its tokens,
        each read behind the tokens before it. If others begin with it, theirs are subtracted: it is what is written if
        none of them is. Then all are divided by their sum.

        Raises:
            InvalidRequest: no answer has a probability, as with a plugin that forbids all of them.
        """
        sums = {ids: sum(self.logprobs[ids[: end + 1]] for end in range(len(ids))) for ids in self.answers}
        highest = max(sums.values())
        if not math.isfinite(highest):
            raise InvalidRequest(f"the model gives no answer of {self.where} a probability", self.where)
        weights = {ids: math.exp(value - highest) for ids, value in sums.items()}
        for ids in sorted(weights, key=len, reverse=True):  # those that begin with others first
            for length in range(1, len(ids)):
                if ids[:length] in weights:
                    weights[ids[:length]] = max(weights[ids[:length]] - weights[ids], 0.0)
        total, best = sum(weights.values()), max(weights.values())
        confidence = min(best * math.exp(highest), 1.0)
        return self.question.answer([weights[ids] / total for ids in self.answers], confidence)


class Read(NamedTuple):
    """One position: behind the prompt of a question and ``path``, the first tokens of an answer.

    ``token_ids``: those whose log probabilities are read; without any, only the prompt is computed.
    """

    asked: Asked
    path: Tokens
    token_ids: list[int]

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=1, logprob_token_ids=self.token_ids)

    def prompt(self) -> Prompt:
        prompt = self.asked.prompt
        return replace(prompt, token_ids=np.concatenate([prompt.token_ids, np.array(self.path, np.int32)]))

    def note(self, found: Iterable[TokenLogprobs] | None) -> None:
        """Keep the result: the log probabilities of its one output token."""
        for each in found or ():
            self.asked.logprobs.update(((*self.path, token), value) for token, value in each.top)


class Decisions:
    """The questions of one request. Once all reads are noted, each has its answer.

    Attributes:
        reads: in stages: what all prompts begin with, then each question, then the inner tokens of its answers.
        ends: where each stage ends. It finds in the prefix cache what those before it have computed.
        num_tokens: number of tokens, those that all prompts begin with once.
    """

    def __init__(self, asked: Sequence[Asked]) -> None:
        """Raise InvalidRequest if these are too many reads."""
        self.asked = asked
        reads = [read for each in asked for read in each.reads()]
        if len(reads) > MAX_READS:
            text = f"the answers of all questions must have at most {MAX_READS} beginnings (got {len(reads)} in tokens)"
            raise InvalidRequest(f"{text}: ask fewer questions, or give choices shorter values", "questions")
        shared = asked[0].prompt.token_ids
        for each in asked:
            most = min(len(shared), len(each.prompt.token_ids))
            differs = np.flatnonzero(shared[:most] != each.prompt.token_ids[:most])
            shared = shared[: differs[0] if len(differs) else most]
        begin = Read(replace(asked[0], prompt=replace(asked[0].prompt, token_ids=shared)), (), [])
        own, inner = ([read for read in reads if bool(read.path) is has_path] for has_path in (False, True))
        stages = [begin] if len(asked) > 1 else [], own, inner
        self.reads, self.ends = [*chain(*stages)], [*accumulate(map(len, stages))]
        self.num_tokens = len(shared) + sum(len(each.prompt.token_ids) - len(shared) for each in asked)
