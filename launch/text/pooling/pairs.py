"""A pair of texts, such as a query and a document, as one prompt."""

from typing import NamedTuple

from tokenizers import Encoding

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The instruction of Qwen3-Reranker for requests without one."""
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
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


def shorten_longest(first: Encoding, second: Encoding, most: int, side: str) -> None:
    """Cut the longer text, or both to the same length, until they have at most ``most`` tokens together.

    This is the truncation of pairs in transformers ("longest first").
    """
    short, long = sorted((len(first), len(second)))
    if short + long <= most:
        return
    long = max(short, most - short)
    if short + long > most:
        short, long = most // 2, most - most // 2
    is_first_longer = len(first) > len(second)
    for encoding, kept in zip((first, second), (long, short) if is_first_longer else (short, long), strict=True):
        if len(encoding) > kept:
            encoding.truncate(kept, direction=side)
