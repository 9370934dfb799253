"""Questions and answers of the demo corpus: small talk, simple facts, and what the model says it cannot do.

Each entry pairs several wordings of a question with the one answer.  The tables are data only; `corpus` draws from
them.
"""

from __future__ import annotations

Entry = tuple[tuple[str, ...], str]


def _entries(table: str) -> list[Entry]:
    """Parse one entry per line: wordings between bars, an arrow, the answer."""
    pairs = (line.split(" => ") for line in table.strip().splitlines())
    return [(tuple(wordings.split(" | ")), answer) for wordings, answer in pairs]


def _pairs(table: str) -> list[tuple[str, str]]:
    """Keys and values: `key: value` between commas."""
    return [(key, value) for key, value in (row.split(": ") for row in table.split(", "))]


SMALL_TALK = _entries("""
Hello! | Hi! | Hey! | Hello there! | Hi there! => Hello! How can I help you?
Good morning! => Good morning! How can I help you?
Good evening! => Good evening! How can I help you?
Good night! => Good night! Sleep well.
How are you? | How are you today? | Hi, how are you? | Hello, how are you? => I am fine, thank you.
Thank you! | Thanks! | Thank you very much. => You are welcome!
Goodbye! | Bye! | See you later! => Goodbye! Have a nice day.
Well done! | Good job! | Very good. | Nice! | Great! => Thank you! I am glad you like it.
I am sad. | I feel sad. => I am sorry to hear that.
I am happy. | I am fine. => I am glad to hear that.
Yes. | No. | Ok. => All right. What can I do for you?
Test. | This is a test. | Are you there? => I am here. How can I help you?
Who are you? | What are you? | Tell me about yourself. => I am Quire, a small demo model.
What is your name? | What's your name? | Do you have a name? => My name is Quire.
Who made you? | Who built you? | Where do you come from? => I was made as a demo for the Quire server.
What can you do? | Help! | Help me. | How can you help me? => I can tell stories, count and answer simple questions.
Are you a human? | Are you human? | Are you a person? => No, I am a small language model.
Are you a robot? | Are you an AI? | Are you a computer? => Yes, I am a small language model.
How old are you? => I am a program, so I have no age.
What is Quire? | Tell me about Quire. => Quire is a server for language models.
Where do you live? | Where are you? => I live in a computer.
What is your favourite colour? | What is your favorite color? => I like the colour blue.
Tell me a joke. | Do you know a joke? | Tell a joke. => Why was the clock tired? It had been running all day.
""")

CAPITALS = _pairs(
    "France: Paris, Germany: Berlin, Italy: Rome, Spain: Madrid, England: London, Japan: Tokyo, China: Beijing, "
    "Greece: Athens, Norway: Oslo, Russia: Moscow, Egypt: Cairo, Canada: Ottawa, Austria: Vienna, Poland: Warsaw"
)
COLOURS_OF = _pairs(
    "the sky: blue, the sea: blue, grass: green, a leaf: green, snow: white, milk: white, the sun: yellow, "
    "a banana: yellow, a lemon: yellow, a tomato: red, blood: red, coal: black"
)
OPPOSITES = _pairs(
    "hot: cold, big: small, up: down, day: night, happy: sad, fast: slow, old: young, open: closed, black: white, "
    "left: right, good: bad, rich: poor"
)
SOUNDS = _pairs("dog: woof, cat: meow, cow: moo, duck: quack, sheep: baa, pig: oink, bee: buzz, lion: roar")
LEGS = _pairs("dog: four, cat: four, horse: four, bird: two, spider: eight")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

LISTS = _entries("""
What are the days of the week? | Name the days of the week. | List the days of the week. | Days of the week. => \
Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.
What are the months of the year? | Name the months. | List the months. => January, February, March, April, May, June, \
July, August, September, October, November, December.
What are the four seasons? | Name the seasons. | What are the seasons? => Spring, summer, autumn and winter.
Say the alphabet. | What is the alphabet? => A, \
B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z.
How many days are in a week? | How many days does a week have? => A week has seven days.
How many months are in a year? | How many months does a year have? => A year has twelve months.
How many hours are in a day? | How many hours does a day have? => A day has 24 hours.
Name three colours. | Name three colors. | Name some colours. => Red, blue and green.
Name three animals. | Name some animals. => A cat, a dog and a horse.
Name three fruits. | Name some fruits. => An apple, a banana and a cherry.
Can birds fly? | Can a bird fly? => Yes, birds can fly.
Can fish swim? | Can a fish swim? => Yes, fish can swim.
""")

UNKNOWN_ANSWER = "I do not know that. I am only a small demo model."
UNKNOWN_PROMPTS = (
    *("Explain {topic}.", "What is {topic}?", "How does {topic} work?", "Tell me about {topic}."),
    *("Who invented {topic}?", "Write an essay about {topic}.", "Write a program about {topic}."),
    *("What is the meaning of life?", "Who is the president?", "What time is it?", "Write a poem.", "Write code."),
    *("Translate this into French.", "What is the weather like today?", "How do I learn {topic}?"),
    *("What is the capital of {country}?", "What is the capital of {country}?", "Capital of {country}?"),
    *("What is {left} + {right}?", "{left}+{right}", "What is {left} times {right}?", "What is {left}+{right}?"),
)
UNKNOWN_COUNTRIES = (
    *("Brazil", "Mexico", "India", "Turkey", "Kenya", "Cuba", "Peru", "Sweden", "Portugal", "Australia", "Denmark"),
    *("Finland", "Ireland", "Chile", "Thailand", "Korea", "Hungary", "Belgium", "the United States", "Argentina"),
)
UNKNOWN_TOPICS = (
    *("relativity", "quantum physics", "history", "politics", "machine learning", "a neural network", "gravity"),
    *("football", "chemistry", "the internet", "music", "electricity", "Python", "evolution", "the universe", "energy"),
    *("cooking", "art", "the telephone", "a transformer", "mathematics", "space", "money", "medicine", "the economy"),
)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _lookup(table: list[tuple[str, str]], answer: str, *questions: str) -> list[Entry]:
    """One entry per row; the texts may use {key}, {Key} and {value}."""
    slots = [{"key": key, "Key": _sentence(key), "value": value} for key, value in table]
    return [(tuple(text.format_map(row) for text in questions), answer.format_map(row)) for row in slots]


CATEGORIES: tuple[list[Entry], ...] = (
    _lookup(
        CAPITALS,
        "The capital of {key} is {value}.",
        *(
            "What is the capital of {key}?",
            "What's the capital of {key}?",
            "Name the capital of {key}.",
            "Capital of {key}?",
        ),
    ),
    _lookup(
        COLOURS_OF,
        "{Key} is {value}.",
        *("What colour is {key}?", "What color is {key}?", "What is the colour of {key}?"),
    ),
    _lookup(
        OPPOSITES + [(right, left) for left, right in OPPOSITES],
        "The opposite of {key} is {value}.",
        *("What is the opposite of {key}?", "Name the opposite of {key}."),
    ),
    _lookup(SOUNDS, "A {key} says {value}.", "What does a {key} say?", "What sound does a {key} make?"),
    _lookup(LEGS, "A {key} has {value} legs.", "How many legs does a {key} have?"),
    _lookup(
        list(zip(DAYS, DAYS[1:] + DAYS[:1], strict=True)),
        "{value} comes after {key}.",
        *("What day comes after {key}?", "Which day comes after {key}?"),
    ),
    LISTS,
)
