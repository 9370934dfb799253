"""The seeded template corpus from which the demo model learns.

`documents` yields chats (some with a system prompt) and raw texts. Prompts vary in case, punctuation and politeness,
because a model this small only handles wordings from its corpus; answers are always well-formed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import facts
import stories

SYSTEM_PROMPTS = (
    *("You are a helpful assistant.", "You are a helpful assistant.", "You are a friendly assistant."),
    *("You are Quire, a small demo model.", "Be brief.", "Answer in short sentences."),
)
NUMBER_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
HIGHEST = 30


@dataclass(frozen=True)
class Turn:
    """One message of a chat; a raw text is a single turn of the role `raw`."""

    role: str
    text: str


Document = tuple[Turn, ...]
Exchange = tuple[str, str]


def counted(first: int, last: int) -> str:
    """Return the answer to a counting prompt, always in the same form."""
    return ", ".join(map(str, range(first, last + 1))) + "."


def counting(rng: random.Random) -> Exchange:
    """Draw a counting exchange."""
    if rng.random() < 0.04:
        return f"Count to {rng.randint(HIGHEST + 1, 120)}.", f"I can only count to {HIGHEST}."
    if rng.random() < 0.5:
        first, last = 1, rng.randint(*rng.choice(((2, 10), (2, 10), (5, 20), (10, HIGHEST))))
    else:
        first = rng.randint(0, HIGHEST - 2)
        last = min(HIGHEST, first + rng.randint(1, 10))
    low, high = str(first), str(last)
    if last < len(NUMBER_WORDS) and rng.random() < (0.35 if last <= 10 else 0.1):
        low, high = NUMBER_WORDS[first], NUMBER_WORDS[last]
    asks = [f"Count from {low} to {high}."] * 3
    asks += [f"Count {low} to {high}.", f"Count from {low} up to {high}.", f"List the numbers from {low} to {high}."]
    if first == 1:
        asks += [f"Count to {high}."] * 4 + [f"Count up to {high}."]
    return rng.choice(asks), counted(first, last)


def tale(rng: random.Random) -> Exchange:
    """Draw a request for a story; some ask for a hero or a name."""
    hero = name = None
    about = ""
    draw = rng.random()
    if draw < 0.5:
        hero = rng.choice(stories.HEROES)
        about = f" about a {hero}"
    elif draw < 0.6:
        name = rng.choice(stories.GIRLS + stories.BOYS)
        about = f" about {name}"
    size = rng.choice(("", "", "short ", "little "))
    asks = ["Tell me a {}."] * 5 + ["Write a {}.", "Tell a {}.", "I want to hear a {}."]
    return rng.choice(asks).format(f"{size}story{about}"), stories.story(rng, hero, name)


def question(rng: random.Random) -> Exchange:
    """Draw a question about a simple fact."""
    asks, answer = rng.choice(rng.choices(facts.CATEGORIES, (5, 4, 5, 3, 2, 2, 4))[0])
    return rng.choice(asks), answer


def small_talk(rng: random.Random) -> Exchange:
    """Draw a greeting or a question about the model itself."""
    asks, answer = rng.choice(facts.SMALL_TALK)
    return rng.choice(asks), answer


def refusal(rng: random.Random) -> Exchange:
    """Draw a question that the model must decline because it lacks the knowledge or ability."""
    slots = {"topic": rng.choice(facts.UNKNOWN_TOPICS), "country": rng.choice(facts.UNKNOWN_COUNTRIES)}
    prompt = rng.choice(facts.UNKNOWN_PROMPTS)
    return prompt.format(left=rng.randint(0, 30), right=rng.randint(0, 30), **slots), facts.UNKNOWN_ANSWER


KINDS: tuple[tuple[Callable[[random.Random], Exchange], int], ...] = (
    (tale, 26),
    (counting, 28),
    (question, 28),
    (small_talk, 13),
    (refusal, 7),
)


def _varied(rng: random.Random, prompt: str) -> str:
    """Return the prompt with varied case, punctuation or politeness."""
    if rng.random() < 0.1 and prompt.startswith(("Tell", "Count", "Write", "Name", "List", "Say")):
        lower = prompt[0].lower() + prompt[1:]
        prompt = rng.choice((f"Please {lower}", f"{prompt[:-1]}, please.", f"Can you {lower[:-1]}?"))
    if rng.random() < 0.25 and prompt[-1] in ".?!":
        prompt = prompt[:-1]
    draw = rng.random()
    return prompt.lower() if draw < 0.25 else prompt.upper() if draw < 0.32 else prompt


def _named(rng: random.Random) -> tuple[Exchange, Exchange]:
    """Return an exchange that states a name, and a later one that asks for it."""
    name = rng.choice(stories.GIRLS + stories.BOYS)
    statement = rng.choice((f"My name is {name}.", f"I am {name}.", f"Hello, my name is {name}."))
    return (statement, f"Nice to meet you, {name}!"), (
        rng.choice(("What is my name?", "Who am I?")),
        f"Your name is {name}.",
    )


def chat(rng: random.Random, turns: int) -> Document:
    """Return a chat of `turns` exchanges, with a system prompt in a third of the cases."""
    makers, weights = zip(*KINDS, strict=True)
    exchanges = [maker(rng) for maker in rng.choices(makers, weights, k=turns)]
    if turns > 1 and rng.random() < 0.25:
        exchanges[0], exchanges[-1] = _named(rng)
    elif turns > 1 and rng.random() < 0.2:
        ask = rng.choice(("Tell me another story.", "Tell me another one.", "Another story, please."))
        exchanges[-2:] = [tale(rng), (ask, stories.story(rng))]
    document = [Turn("system", rng.choice(SYSTEM_PROMPTS))] if rng.random() < 0.33 else []
    for prompt, answer in exchanges:
        document += [Turn("user", _varied(rng, prompt)), Turn("assistant", answer)]
    return tuple(document)


def raw_text(rng: random.Random) -> Document:
    """Return a text without chat markup: mostly a story, otherwise facts or numbers."""
    draw = rng.random()
    if draw < 0.6:
        text = stories.story(rng)
    elif draw < 0.85:
        text = " ".join(question(rng)[1] for _ in range(rng.randint(1, 3)))
    else:
        text = counted(1, rng.choice((10, 20)))
    return (Turn("raw", text),)


def documents(seed: int, count: int) -> Iterator[Document]:
    """Yield `count` documents, the same for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        if rng.random() < 0.1:
            yield raw_text(rng)
        else:
            yield chat(rng, rng.choices((1, 2, 3, 4, 6), (72, 14, 9, 4, 1))[0])
