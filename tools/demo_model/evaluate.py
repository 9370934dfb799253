"""The self-check of the demo model: prompts with checkable answers, decoded greedily or with a fixed seed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import corpus
import facts
import stories
import torch
from corpus import Document, Turn
from llama import Llama, rotary_tables
from tokenizer import END_OF_TEXT_ID, IM_END_ID, encode_prompt
from tokenizers import Tokenizer

MAX_TOKENS = 200
NAMES = frozenset(stories.GIRLS + stories.BOYS)


@dataclass(frozen=True)
class Check:
    """A prompt and a predicate for right answers."""

    kind: str
    prompt: Document
    right: Callable[[str], bool]


def generate(
    model: Llama, tokenizer: Tokenizer, prompt: Document, temperature: float, seed: int = 0
) -> tuple[str, bool]:
    """Return the continuation, and whether it stopped by itself."""
    random = torch.Generator().manual_seed(seed)
    tokens = encode_prompt(tokenizer, prompt)
    start = len(tokens)
    cos, sin = rotary_tables(model.shape, start + MAX_TOKENS)
    with torch.inference_mode():
        while len(tokens) < start + MAX_TOKENS:
            size = len(tokens)
            mask = torch.ones(size, size, dtype=torch.bool).tril()
            scores = model.logits(model.model(torch.tensor([tokens]), cos[:size], sin[:size], mask)[0, -1])
            if temperature:
                token = int(torch.multinomial((scores / temperature).softmax(-1), 1, generator=random))
            else:
                token = int(scores.argmax())
            if token in (IM_END_ID, END_OF_TEXT_ID):
                return tokenizer.decode(tokens[start:]), True
            tokens.append(token)
    return tokenizer.decode(tokens[start:]), False


def story_is_sound(text: str, hero: str = "", name: str = "") -> bool:
    """Whether a story has whole sentences about one name, one pronoun, and the requested hero or name."""
    found = re.findall(r"\w+", text)
    names = NAMES & set(found)
    if len(names) != 1 or not 30 <= len(found) <= 120 or not text.endswith((".", '"')) or text.count('"') % 2:
        return False
    wrong = {"he", "his", "him"} if names & set(stories.GIRLS) else {"she", "her"}
    starts = all(sentence[0].isupper() for sentence in re.findall(r'(?<=\. )"?(\w)', text))
    first = text.split(". ")[0]
    return not wrong & {word.lower() for word in found} and starts and f" {hero}" in f"{first} " and name in text


def _is(answer: str) -> Callable[[str], bool]:
    return lambda text: text == answer


def _is_story(start: str = "", hero: str = "", name: str = "") -> Callable[[str], bool]:
    return lambda text: story_is_sound(start + text, hero, name)


def _story_checks() -> Iterator[Check]:
    for prompt in ("Tell me a story.", "Tell me a short story", "tell me a story", "Write a story."):
        yield Check("story", (Turn("user", prompt),), _is_story())
    for hero in ("cat", "dog", "girl", "boy", "dragon"):
        for prompt in (f"Tell me a story about a {hero}.", f"tell me a short story about a {hero}"):
            yield Check("story about", (Turn("user", prompt),), _is_story(hero=hero))
    for name in ("Tom", "Lucy"):
        yield Check("story about", (Turn("user", f"Tell me a story about {name}."),), _is_story(name=name))
    for start in ("Once upon a time", "Once upon a time,", "Once upon a time, there was a little dog"):
        yield Check("raw text", (Turn("raw", start),), _is_story(start))
    yield Check("raw text", (Turn("raw", "The capital of France is"),), lambda text: text.startswith(" Paris."))


def _counting_checks() -> Iterator[Check]:
    asks = [("Count from 1 to 10.", 1, 10), ("Count to five.", 1, 5), ("Count to 20", 1, 20), ("count to ten", 1, 10)]
    asks += [("Count from 3 to 9.", 3, 9), ("count from 1 to 5", 1, 5), ("Please count to 7.", 1, 7)]
    asks += [(f"count to {corpus.NUMBER_WORDS[last]}", 1, last) for last in (2, 3, 4, 6, 7, 8, 9, 12)]
    for last in range(2, corpus.HIGHEST + 1, 3):
        first = max(1, last - 7)
        asks += [(f"Count to {last}.", 1, last), (f"Count from {first} to {last}.", first, last)]
    for prompt, first, last in asks:
        yield Check("counting", (Turn("user", prompt),), _is(corpus.counted(first, last)))


def _answer_checks() -> Iterator[Check]:
    for entries, kind in (([*chain(*facts.CATEGORIES)], "fact"), (facts.SMALL_TALK, "small talk")):
        for number, (wordings, answer) in enumerate(entries):
            prompt = wordings[number % len(wordings)]
            prompt = (prompt, prompt.lower(), prompt[:-1], prompt[:-1].lower())[number % 4]
            yield Check(kind, (Turn("user", prompt),), _is(answer))


def _turn_checks() -> Iterator[Check]:
    hello = (Turn("user", "Hello!"), Turn("assistant", "Hello! How can I help you?"))
    count = (Turn("user", "Count to 4."), Turn("assistant", corpus.counted(1, 4)))
    named = (Turn("user", "My name is Emma."), Turn("assistant", "Nice to meet you, Emma!"))
    capital = Turn("user", "What is the capital of Italy?")
    for before in (hello, count, named, hello + count, named + hello, count + named):
        yield Check("later turn", (*before, capital), _is("The capital of Italy is Rome."))
        yield Check("later turn", (*before, Turn("user", "Count from 2 to 6.")), _is(corpus.counted(2, 6)))
        yield Check("later turn", (*before, Turn("user", "Tell me a story.")), story_is_sound)
        name = (*before, Turn("user", "My name is Lucy."))
        yield Check("later turn", name, _is("Nice to meet you, Lucy!"))
        if named[0] in before:
            yield Check("later turn", (*before, Turn("user", "What is my name?")), _is("Your name is Emma."))


def _other_checks() -> Iterator[Check]:
    """Capital letters, and wordings that are not in the corpus."""
    yield Check("capital letters", (Turn("user", "TELL ME A STORY"),), _is_story())
    yield Check("capital letters", (Turn("user", "TELL ME A STORY ABOUT A CAT."),), _is_story(hero="cat"))
    for prompt, answer in (
        ("COUNT TO 5", corpus.counted(1, 5)),
        ("COUNT FROM 3 TO 9.", corpus.counted(3, 9)),
        ("HELLO", "Hello! How can I help you?"),
        ("WHAT IS YOUR NAME?", "My name is Quire."),
        ("WHAT IS THE CAPITAL OF FRANCE?", "The capital of France is Paris."),
    ):
        yield Check("capital letters", (Turn("user", prompt),), _is(answer))
    yield Check("new wording", (Turn("user", "Could you tell me a story please?"),), _is_story())
    yield Check("new wording", (Turn("user", "I would like a story about a dog."),), _is_story(hero="dog"))
    for prompt, answer in (
        ("Could you count to 8 for me?", corpus.counted(1, 8)),
        ("Start at 4 and count to 9.", corpus.counted(4, 9)),
        ("hey there", "Hello! How can I help you?"),
        ("Which city is the capital of Japan?", "The capital of Japan is Tokyo."),
        ("What's the opposite of big?", "The opposite of big is small."),
        ("What does the cow say?", "A cow says moo."),
        ("How many legs has a spider?", "A spider has eight legs."),
        ("Tell me your name.", "My name is Quire."),
        ("What is the capital of Iceland?", facts.UNKNOWN_ANSWER),
    ):
        yield Check("new wording", (Turn("user", prompt),), _is(answer))


def checks() -> list[Check]:
    """Return every check, always in the same order."""
    return [*_counting_checks(), *_answer_checks(), *_story_checks(), *_turn_checks(), *_other_checks()]


def report(
    model: Llama, tokenizer: Tokenizer, selected: Sequence[Check], temperature: float, log: Callable[[str], None]
) -> None:
    """Print each failed check, and the pass rate of each kind."""
    passed: dict[str, list[bool]] = {}
    for number, check in enumerate(selected):
        text, stopped = generate(model, tokenizer, check.prompt, temperature, number)
        right = stopped and check.right(text)
        passed.setdefault(check.kind, []).append(right)
        if not right:
            log(f"  {check.prompt[-1].text!r} -> {json.dumps(text)}{'' if stopped else ' (does not stop)'}")
    rates = "; ".join(f"{kind} {sum(results)}/{len(results)}" for kind, results in passed.items())
    log(f"temperature {temperature}: {rates}")
