"""A pair of texts, such as a query and a document, as one prompt."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenizers import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The instruction of Qwen3-Reranker for requests without one."""
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
WITH_TYPES = ("", *(f"{name}Tokenizer" for name in ("Bert", "Electra", "MobileBert", "DebertaV2", "FNet")))
"""Tokenizers of transformers whose ``model_input_names`` have token_type_ids."""
PREFIX = f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n"
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class TextPair(NamedTuple):
    """Two texts of one prompt. ``instruction``: for models with a template for it; "": the model's own."""

    first: str
    second: str
    instruction: str = ""


def judged_text(pair: TextPair) -> str:
    """Return the text between PREFIX and SUFFIX in the prompt of a model that answers yes or no (Qwen3-Reranker)."""
    return f"<Instruct>: {pair.instruction or INSTRUCTION}\n<Query>: {pair.first}\n<Document>: {pair.second}"


def gives_types(input_names: Any, tokenizer_class: str) -> bool:
    """Whether transformers gives a model the types of tokens, by ``model_input_names``, or else those of the class.

    Without a class, that of the model is used: of those with two types, BERT's.
    """
    if isinstance(input_names, list):
        return "token_type_ids" in input_names
    return tokenizer_class.removesuffix("Fast") in WITH_TYPES


def kept_tokens(num_first: int, num_second: int, most: int) -> tuple[int, int]:
    """Return how many tokens are kept of two texts with these numbers of tokens, which may have ``most`` together.

    The longer one is cut, or both to the same length: the truncation of pairs in transformers ("longest first").
    """
    short, long = sorted((num_first, num_second))
    if short + long > most:
        long = max(short, most - short)
    if short + long > most:
        short, long = most // 2, most - most // 2
    return (long, short) if num_first > num_second else (short, long)


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What a tokenizer adds before, between and after texts. ``has_types``: the second text has a type of its own."""

    before: list[int]
    between: list[int]
    after: list[int]
    has_types: bool = False

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, is_pair: bool, gives_types: bool = True) -> "SpecialTokens":
        """Find them by encoding short texts. ``gives_types``: of this function."""
        found = tokenizer.encode(_SHORT, _SHORT) if is_pair else tokenizer.encode(_SHORT)
        places = [index for index, text in enumerate(found.sequence_ids) if text is not None]
        if not places:
            return cls(found.ids, [], [])
        ids, inner = found.ids, range(places[0], places[-1])
        between = [ids[index] for index in inner if found.sequence_ids[index] is None]
        return cls(ids[: places[0]], between, ids[places[-1] + 1 :], gives_types and found.type_ids[places[-1]] == 1)

    def __len__(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)

    def second_text(self, first: list[int]) -> int:
        """Return the index at which the second text begins after the first; 0 if the types of both are the same."""
        return self.has_types * (len(self.before) + len(first) + len(self.between))

    def around(self, first: list[int], second: list[int] | None = None) -> list[int]:
        return [*self.before, *first, *self.between, *(second or ()), *self.after]


_SHORT = "a"
