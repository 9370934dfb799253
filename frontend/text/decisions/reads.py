"""The log probabilities that questions need, and the answers that follow from them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from quire.frontend.text.decisions.asking import Asked, num_shared
from quire.frontend.text.prompts import Prompt
from quire.protocol.errors import InvalidRequest
from quire.protocol.request.sampling_params import MAX_CANDIDATES, SamplingParams
from quire.protocol.wire.logprobs import TokenLogprobs

MAX_READS = 16_384
"""Most positions at which one request reads the model's distribution."""


class AnswerProbability(msgspec.Struct, frozen=True, omit_defaults=True):
    """``value``: that of a choice, or the number of a level, from 0. ``label``: of a level."""

    value: str | bool | int
    probability: float
    label: str | None = None


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to one question; fields of other types of questions are None.

    Attributes:
        type: predicate, choice or score.
        name: the question's.
        probability: that a predicate is true.
        choice: the most likely value.
        score: the mean of the levels' numbers.
        confidence: of a choice or score: how likely the model writes the most likely answer, among all texts.
        probabilities: of each choice or level, in the order of the question; their sum is 1.
    """

    type: str
    name: str | None
    probability: float | None = None
    choice: str | bool | None = None
    score: float | None = None
    confidence: float | None = None
    probabilities: list[AnswerProbability] | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """One position: the last one of a prompt and of the tokens behind it.

    Attributes:
        question: index of the question.
        prompt: with ``path``.
        path: the first tokens of an answer.
        token_ids: the tokens whose log probabilities are read there; without any, only the prompt is computed.
    """

    question: int
    prompt: Prompt
    path: tuple[int, ...]
    token_ids: list[int]

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=1, logprob_token_ids=self.token_ids)

    def whole_prompt(self) -> Prompt:
        return replace(self.prompt, token_ids=np.concatenate([self.prompt.token_ids, np.array(self.path, np.int32)]))


class Decisions:
    """The questions of one request: what must be read in the engine, and then the answers.

    An answer's probability is that of its whole token sequence: the product of those of its tokens, each read behind
    the tokens before it. If other allowed answers begin with it, theirs are subtracted: it is what is written if none
    of them is. The probabilities of a question's answers are then divided by their sum.

    Attributes:
        stages: reads that may run together, after those of the stages before, whose blocks they find in the prefix
            cache: what all prompts begin with, then each question, then the inner tokens of its answers.
        num_tokens: number of tokens, those that all prompts begin with once.
    """

    def __init__(self, asked: Sequence[Asked]) -> None:
        """Raise InvalidRequest if these are too many reads."""
        self._asked = asked
        self._logprobs: list[dict[tuple[int, ...], float]] = [{} for _ in asked]
        """By question: of the last token of each sequence."""
        reads = [read for i, each in enumerate(asked) for read in _reads(i, each)]
        if len(reads) > MAX_READS:
            text = f"the answers of all questions must have at most {MAX_READS} beginnings (got {len(reads)} in tokens)"
            raise InvalidRequest(f"{text}: ask fewer questions, or give choices shorter values", "questions")
        shared = num_shared(asked)
        prefix = replace(asked[0].prompt, token_ids=asked[0].prompt.token_ids[:shared], plain_spans=())
        begin = [Read(0, prefix, (), [])] if len(asked) > 1 and shared else []
        stages = begin, [read for read in reads if not read.path], [read for read in reads if read.path]
        self.stages = [stage for stage in stages if stage]
        self.num_tokens = shared + sum(len(each.prompt.token_ids) - shared for each in asked)

    def note(self, read: Read, found: Iterable[TokenLogprobs]) -> None:
        """Keep the result of a read: the log probabilities of its one output token."""
        for each in found:
            self._logprobs[read.question].update(((*read.path, token), value) for token, value in each.top)

    def answers(self) -> list[Answer]:
        """Return the answers, in the order of the questions, once all reads are noted."""
        return [_answer(each, found) for each, found in zip(self._asked, self._logprobs, strict=True)]


def _reads(index: int, asked: Asked) -> Iterable[Read]:
    following: dict[tuple[int, ...], dict[int, None]] = {}
    for answer in asked.answers:
        for length, token in enumerate(answer):
            following.setdefault(answer[:length], {})[token] = None
    for path, tokens in following.items():
        ids = [*tokens]
        for begin in range(0, len(ids), MAX_CANDIDATES):
            yield Read(index, asked.prompt, path, ids[begin : begin + MAX_CANDIDATES])


def _answer(asked: Asked, logprobs: dict[tuple[int, ...], float]) -> Answer:
    question = asked.question
    sums = {ids: sum(logprobs[ids[: end + 1]] for end in range(len(ids))) for ids in asked.answers}
    highest = max(sums.values())
    if not math.isfinite(highest):
        raise InvalidRequest(f"the model gives no answer of {question.where} a probability", question.where)
    weights = {ids: math.exp(value - highest) for ids, value in sums.items()}
    for ids in sorted(weights, key=len, reverse=True):  # those that begin with others first
        for length in range(1, len(ids)):
            if ids[:length] in weights:
                weights[ids[:length]] = max(weights[ids[:length]] - weights[ids], 0.0)
    total = sum(weights.values())
    each = [weights[ids] / total for ids in asked.answers]
    best = max(range(len(each)), key=each.__getitem__)
    confidence = min(weights[asked.answers[best]] * math.exp(highest), 1.0)
    if question.kind == "predicate":
        return Answer("predicate", question.name, probability=each[0])
    if question.kind == "choice":
        found = [AnswerProbability(*pair) for pair in zip(question.values, each, strict=True)]
        return Answer("choice", question.name, choice=question.values[best], confidence=confidence, probabilities=found)
    found = [
        AnswerProbability(i, p, str(label)) for i, (label, p) in enumerate(zip(question.values, each, strict=True))
    ]
    score = sum(i * p for i, p in enumerate(each))
    return Answer("score", question.name, score=score, confidence=confidence, probabilities=found)
