"""The seeded template corpus that the demo model learns from.

`documents` yields chats (optionally behind a system prompt) and raw texts.  Prompts are varied in case, punctuation
and politeness, because a model this small only takes the wordings that it has met; answers are always tidy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quire.launch.demo import facts, stories

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful assistant.",
    "You are Quire, a small demo model.", "Be brief.", "Answer in short sentences.", "You are a friendly assistant.",
    "You are a helpful, honest and friendly assistant. Answer the user's questions.", "You tell stories to children.",
)
UNITS = stories.words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen")
TENS = stories.words("twenty thirty forty fifty sixty seventy eighty ninety")
SYLLABLES = stories.words(
    "ba be bi bo da de do fa fi ga go ka ki ko la le li lo ma mi mo na ne no pa pe pi ra ri ro sa se si so "
    "ta te ti to va vi wa zu")
WORDS = tuple(stories.ANIMALS) + stories.THINGS + stories.COLOURS + stories.FOODS + tuple(stories.words(
    "sun moon star house river mountain water happy tomorrow today good very music window table garden the is and a "
    "we you they love like see go run here there one two three world hello friend nice blue sky green grass"))


@dataclass(frozen=True)
class Turn:
    """One message of a chat; a raw text is a single turn of the role `raw`."""

    role: str
    text: str


Document = tuple[Turn, ...]
Exchange = tuple[str, str]


def number_word(value: int) -> str:
    """An integer from 0 to 100 in words."""
    if value == 100:
        return "one hundred"
    if value < 20:
        return UNITS[value]
    tens = TENS[value // 10 - 2]
    return tens if value % 10 == 0 else f"{tens}-{UNITS[value % 10]}"


def _limit(rng: random.Random) -> int:
    draw = rng.random()
    return rng.randint(2, 20) if draw < 0.75 else rng.randint(21, 50) if draw < 0.93 else rng.randint(51, 100)


def _number(rng: random.Random, value: int) -> str:
    return number_word(value) if rng.random() < 0.25 else str(value)


def _joined(rng: random.Random, values: list[int], prompt: str) -> Exchange:
    """Adds, for some prompts, a wish for a layout, and writes the values accordingly."""
    draw = rng.random()
    if draw < 0.72:
        return prompt + ".", ", ".join(map(str, values)) + "."
    if draw < 0.82:
        wish = rng.choice((", one number per line", ", each on a new line", ", one per line"))
        return prompt + wish + ".", "\n".join(map(str, values))
    if draw < 0.91:
        wish = rng.choice((", separated by spaces", " with spaces", " without commas"))
        return prompt + wish + ".", " ".join(map(str, values))
    return prompt + rng.choice((" in words", ", in words")) + ".", ", ".join(map(number_word, values)) + "."


def counting(rng: random.Random) -> Exchange:
    """Counting up, down and in steps."""
    kind = rng.random()
    if kind < 0.72:
        last = _limit(rng)
        first = 1
        if rng.random() < 0.55:
            first = rng.randint(0 if rng.random() < 0.1 else 1, last - 1)
            first = max(first, last - 40)
        low, high = _number(rng, first), _number(rng, last)
        asks = [f"Count from {low} to {high}", f"Count from {low} up to {high}", f"Count {low} to {high}",
                f"List the numbers from {low} to {high}", f"Say the numbers from {low} to {high}",
                f"Count the numbers from {low} to {high}", f"Start at {low} and count to {high}"]
        if first == 1:
            asks += [f"Count to {high}", f"Count up to {high}"] * 4
        return _joined(rng, list(range(first, last + 1)), rng.choice(asks))
    if kind < 0.87:
        first = rng.randint(2, 20)
        last = 1 if rng.random() < 0.6 else rng.randint(0, first - 1)
        asks = [f"Count backwards from {first} to {last}", f"Count down from {first} to {last}",
                f"Count from {first} down to {last}", f"Count from {first} to {last}"]
        if last == 1:
            asks += [f"Count down from {first}", f"Count backwards from {first}"]
        return _joined(rng, list(range(first, last - 1, -1)), rng.choice(asks))
    step = rng.choice((2, 2, 5, 10))
    first = rng.choice((step, step, 1)) if step == 2 else step
    last = first + step * rng.randint(2, 9)
    name = rng.choice((number_word(step) + ("es" if step == 6 else "s"), f"{step}s"))
    ask = rng.choice((f"Count by {name} from {first} to {last}", f"Count from {first} to {last} by {name}"))
    return _joined(rng, list(range(first, last + 1, step)), ask)


def arithmetic(rng: random.Random) -> Exchange:
    """Sums and differences within twenty, and what comes next to a number."""
    kind = rng.random()
    if kind < 0.5:
        left, right = rng.randint(0, 10), rng.randint(0, 10)
        sign, word, result = "+", "plus", left + right
    elif kind < 0.75:
        left = rng.randint(0, 12)
        right = rng.randint(0, left)
        sign, word, result = "-", "minus", left - right
    else:
        value = rng.randint(1, 40)
        after = rng.random() < 0.6
        side, other = ("after", value + 1) if after else ("before", value - 1)
        ask = rng.choice(("What number comes {} {}?", "What comes {} {}?", "Which number comes {} {}?"))
        return ask.format(side, value), f"{other} comes {side} {value}."
    ask = rng.choice((f"What is {left} {word} {right}?", f"What is {left} {sign} {right}?", f"{left} {sign} {right}",
                      f"{left}{sign}{right}", f"How much is {left} {word} {right}?", f"{left} {sign} {right} = ?",
                      f"What is {left}{sign}{right}?", f"What's {left} {sign} {right}?", f"{left} {word} {right}"))
    return ask, f"{left} {word} {right} is {result}."


def tale(rng: random.Random) -> Exchange:
    """A request for a story, with or without a wish for its hero or topic."""
    long = rng.random() < 0.12
    size = "long" if long else rng.choice(("", "", "short", "little", "nice", "new", "bedtime"))
    kind = rng.random()
    about, noun, name, topic = "", None, None, None
    if kind < 0.35:
        noun = rng.choice((*stories.HEROES, "girl", "boy"))
        about = f" about {stories.with_article(noun)}"
        if rng.random() < 0.25:
            name = rng.choice(stories.GIRLS if noun == "girl" else stories.BOYS if noun == "boy"
                              else stories.GIRLS + stories.BOYS)
            about += rng.choice((" named ", " called ")) + name
    elif kind < 0.5:
        topic = rng.choice(stories.topics())
        about = f" about {topic}"
    what = stories.with_article(f"{size} story".strip()) + about
    bare = f"Tell me {what}." if name else f"{size} story{about}".strip().capitalize()
    ask = rng.choice((f"Tell me {what}.", f"Tell me {what}.", f"Tell me {what}.", f"Tell {what}.", f"Write {what}.",
                      f"Write me {what}.", f"I want to hear {what}.", f"I would like {what}.",
                      f"Can you tell me {what}?", f"Could you tell me {what}?", f"Please tell me {what}.",
                      f"Give me {what}.", f"Read me {what}.", f"Make up {what}.", bare))
    return ask, stories.story(rng, noun, name, topic, long)


def _phrase(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 4)))
    words = [rng.choice(WORDS) if rng.random() < 0.75 else "".join(rng.choices(SYLLABLES, k=rng.randint(1, 3)))
             for _ in range(rng.randint(1, 7))]
    text = " ".join(words)
    return text[0].upper() + text[1:] + rng.choice(("", ".", "!")) if rng.random() < 0.5 else text


def repeating(rng: random.Random) -> Exchange:
    """Words to be said back, and words in capital letters."""
    if rng.random() < 0.2:
        word = rng.choice(WORDS[:60])
        return rng.choice((f"Write {word} in capital letters.", f"Write the word {word} in capital letters.",
                           f"Say {word} in capital letters.")), word.upper()
    text = _phrase(rng)
    ask = rng.choice(("Repeat after me: {}", "Repeat after me: {}", "Say: {}", "Repeat: {}", "Repeat this: {}",
                      'Say "{}"', 'Repeat "{}"', "Say {}"))
    return ask.format(text), text


def question(rng: random.Random) -> Exchange:
    """A simple fact."""
    asks, answers = rng.choice(FACTS)
    return rng.choice(asks), rng.choice(answers)


def small_talk(rng: random.Random) -> Exchange:
    """Greetings and questions about the model itself."""
    asks, answers = rng.choice(facts.SMALL_TALK)
    return rng.choice(asks), rng.choice(answers)


def refusal(rng: random.Random) -> Exchange:
    """What the model does not know or cannot do, so that it says so."""
    if rng.random() < 0.6:
        prompt, answer = rng.choice(facts.UNKNOWN_PROMPTS), facts.UNKNOWN_ANSWER
    else:
        prompt, answer = rng.choice(facts.CANNOT_PROMPTS), facts.CANNOT_ANSWER
    subject = rng.choice(facts.UNKNOWN_TOPICS)
    if rng.random() < 0.4:
        subject = rng.choice(("a ", "the ", "")) + "".join(rng.choices(SYLLABLES, k=rng.randint(2, 4)))
    return prompt.format(topic=subject), answer


FACTS = facts.fact_entries()
KINDS: tuple[tuple[Callable[[random.Random], Exchange], int], ...] = (
    (tale, 24), (counting, 22), (question, 22), (small_talk, 12), (arithmetic, 10), (repeating, 8), (refusal, 6),
)


def _varied(rng: random.Random, prompt: str) -> str:
    """The prompt with a change of case, punctuation or politeness."""
    literal = prompt.startswith(("Repeat", "Say"))
    if not literal and prompt.endswith(".") and rng.random() < 0.12:
        prompt = rng.choice((prompt[:-1] + ", please.", "Please " + prompt[0].lower() + prompt[1:], prompt[:-1] + "!",
                             prompt[:-1] + " please", "Can you " + prompt[0].lower() + prompt[1:-1] + "?",
                             "Hi! " + prompt))
    if not literal and prompt[-1] in ".?!" and rng.random() < 0.25:
        prompt = prompt[:-1]
    if not literal and rng.random() < 0.2:
        prompt = prompt.lower()
    return prompt


def _named(rng: random.Random) -> tuple[Exchange, Exchange]:
    """A name that is told, and asked for later."""
    name = rng.choice(stories.GIRLS + stories.BOYS)
    told = rng.choice((f"My name is {name}.", f"I am {name}.", f"Hello, my name is {name}.", f"Hi, I am {name}."))
    asked = rng.choice(("What is my name?", "What's my name?", "Do you know my name?", "Who am I?"))
    return (told, f"Nice to meet you, {name}!"), (asked, f"Your name is {name}.")


def chat(rng: random.Random, turns: int) -> Document:
    """A chat of so many exchanges, behind a system prompt in half of the cases."""
    makers, weights = zip(*KINDS, strict=True)
    exchanges = [maker(rng) for maker in rng.choices(makers, weights, k=turns)]
    if turns > 1 and rng.random() < 0.3:
        told, asked = _named(rng)
        at = rng.randrange(turns)
        exchanges.insert(at, told)
        exchanges.insert(rng.randint(at + 1, turns + 1), asked)
    elif turns > 1 and rng.random() < 0.25:
        ask = rng.choice(("Tell me another story.", "Tell me another one.", "Another story, please.",
                          "One more story."))
        exchanges[-2:] = [tale(rng), (ask, stories.story(rng))]
    elif rng.random() < 0.03:
        exchanges = [_named(rng)[0]]
    document = [Turn("system", rng.choice(SYSTEM_PROMPTS))] if rng.random() < 0.5 else []
    for prompt, answer in exchanges:
        document += [Turn("user", _varied(rng, prompt)), Turn("assistant", answer)]
    return tuple(document)


def raw_text(rng: random.Random) -> Document:
    """A text without chat markup: mostly a story, else facts or numbers."""
    draw = rng.random()
    if draw < 0.75:
        text = stories.story(rng, long=rng.random() < 0.15)
    elif draw < 0.9:
        text = " ".join(rng.choice(rng.choice(FACTS[len(facts.LISTS):])[1]) for _ in range(rng.randint(2, 6)))
    else:
        first = rng.randint(1, 60) if rng.random() < 0.5 else 1
        text = ", ".join(str(value) for value in range(first, first + rng.randint(5, 30))) + "."
    return (Turn("raw", text),)


def documents(seed: int, count: int, longest_chat: int = 4) -> Iterator[Document]:
    """So many documents, the same for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        if longest_chat > 4:
            yield chat(rng, rng.randint(5, longest_chat))
        elif rng.random() < 0.12:
            yield raw_text(rng)
        else:
            yield chat(rng, rng.choices((1, 2, 3, 4), (60, 20, 12, 8))[0])
