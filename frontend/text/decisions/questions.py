"""Questions with a fixed list of allowed answers, and their answers, as clients write and read them."""

import json
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from quire.frontend.text.text_parts import joined_text
from quire.protocol.errors import InvalidRequest

Text = Annotated[str, Meta(min_length=1)]


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


class _Option(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    description: str | None = None

    def shown(self, text: str) -> str:
        return f"{text} ({self.description})" if self.description else text


class Choice(_Option, frozen=True):
    value: Text | bool


class Level(_Option, frozen=True):
    label: Text


class _Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all types have.

    Each type has ``options``, the allowed answers as the model is to write them and as it reads them, and makes the
    answer for the client of the probability of each and of the confidence.
    """

    before: ClassVar = ""
    instructions: Text | Annotated[list[Any], Meta(min_length=1)]
    name: str | None = None


class Predicate(_Question, frozen=True, tag="predicate"):
    before: ClassVar = "Is this true? "

    def options(self) -> list[tuple[str, str]]:
        return [("yes", "yes"), ("no", "no")]

    def answer(self, probabilities: list[float], confidence: float) -> Answer:
        return Answer("predicate", self.name, probability=probabilities[0])


class ChoiceQuestion(_Question, frozen=True, tag="choice"):
    choices: Annotated[list[Choice], Meta(min_length=2, max_length=255)]

    def options(self) -> list[tuple[str, str]]:
        """The values are written as they are, or as JSON if true is there beside "true", or false beside "false"."""
        values = [each.value for each in self.choices]
        written = [value if isinstance(value, str) else str(value).lower() for value in values]
        if len(set(written)) < len(written):
            written = [json.dumps(value, ensure_ascii=False) for value in values]
        return [(text, each.shown(text)) for text, each in zip(written, self.choices, strict=True)]

    def answer(self, probabilities: list[float], confidence: float) -> Answer:
        pairs = zip(self.choices, probabilities, strict=True)
        found = [AnswerProbability(each.value, probability) for each, probability in pairs]
        best = max(range(len(found)), key=probabilities.__getitem__)
        return Answer("choice", self.name, choice=self.choices[best].value, confidence=confidence, probabilities=found)


class Score(_Question, frozen=True, tag="score"):
    levels: Annotated[list[Level], Meta(min_length=2, max_length=255)]

    def options(self) -> list[tuple[str, str]]:
        return [(str(i), each.shown(f"{i}: {each.label}")) for i, each in enumerate(self.levels)]

    def answer(self, probabilities: list[float], confidence: float) -> Answer:
        pairs = enumerate(zip(self.levels, probabilities, strict=True))
        found = [AnswerProbability(i, probability, each.label) for i, (each, probability) in pairs]
        score = sum(i * probability for i, probability in enumerate(probabilities))
        return Answer("score", self.name, score=score, confidence=confidence, probabilities=found)


Question = Predicate | ChoiceQuestion | Score
Questions = Annotated[list[Question], Meta(min_length=1, max_length=400)]


def read_questions(given: Any) -> list[Question]:
    """Return the questions of a request; raise InvalidRequest, with the path of the field, if one is malformed."""
    try:
        return list(msgspec.convert(given, Questions))
    except UnicodeEncodeError:  # msgspec cannot write the error about a lone surrogate
        raise InvalidRequest("questions must have types and fields of valid Unicode text", "questions") from None
    except msgspec.ValidationError as error:  # "Expected `str`, got `int` - at `$[0].name`"
        what, _, path = str(error).partition(" - at `$")
        types = ", must be predicate, choice or score" if what.startswith("Invalid value") else ""
        where = f"questions{path[:-1]}"
        raise InvalidRequest(f"{where}: {what}{types}", where) from None


def question_text(question: Question, where: str) -> str:
    """Return what the model reads, with the allowed answers; raise InvalidRequest for parts of other types."""
    asked = joined_text(question.instructions, f"{where}.instructions", ("input_text", "input_json")).strip()
    lines = [f"- {shown}" for _, shown in question.options()]
    return "\n".join([f"{question.before}{asked}", "", "Allowed answers:", *lines])
