"""Template short stories for the demo corpus.

A story is an opening, the sentences of one plot and an ending.  Every sentence has several wordings and shares the
slots of one cast (hero, friend, place, thing), so a model of very few parameters can learn to tell stories that stay
on their hero and are whole and grammatical.  A long story puts two plots behind one opening.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


def words(text: str) -> list[str]:
    """The words of a table that is written as one line."""
    return text.split()


GIRLS = words("Anna Lily Mia Emma Rosa Nora Ella Lucy Clara Zoe Maya Ruby Ida Tess Alice Sara")
BOYS = words("Tom Ben Max Sam Leo Finn Jack Oscar Theo Noah Hugo Paul Emil Felix Adam Tim")
ANIMALS = words(
    "cat dog fox bear rabbit mouse owl duck frog horse hedgehog squirrel turtle penguin lion elephant monkey pig "
    "sheep goat cow hen bird fish tiger wolf deer beaver bee snail kitten puppy"
)
FIGURES = words("robot dragon knight wizard princess prince pirate farmer baker king queen train boat star cloud")
HEROES = tuple(ANIMALS + FIGURES)
HERO_TRAITS = ("little", "small", "young", "brave", "curious", "shy", "cheerful", "clever", "kind", "quiet")
FRIEND_TRAITS = ("old", "kind", "wise", "friendly", "gentle", "tiny", "tall")
PLACES = (
    "in a small village", "near a big forest", "by the sea", "on a green hill", "at the edge of a town",
    "in a cosy house", "beside a blue lake", "on a quiet farm", "in a sunny valley", "under an old oak tree",
)
COLOURS = ("red", "blue", "green", "yellow", "golden", "silver", "white")
THINGS = ("ball", "kite", "hat", "bell", "key", "book", "scarf", "drum", "lamp", "cup", "basket", "coat")
FOODS = ("bread", "soup", "berries", "apples", "cake", "honey", "nuts", "pancakes")


@dataclass(frozen=True)
class Plot:
    """The topics that ask for a plot, and its sentences in order, each a tuple of wordings."""

    topics: tuple[str, ...]
    sentences: tuple[tuple[str, ...], ...]


OPENINGS = (
    "Once upon a time, there was {a_hero} named {name} who lived {place}.",
    "Once upon a time, {a_hero} named {name} lived {place}.",
    "Once upon a time there lived {a_hero} {place}. {His} name was {name}.",
    "Long ago, there was {a_hero} named {name} who lived {place}.",
    "There was once {a_hero} named {name} who lived {place}.",
)
BRIDGES = (
    "The next day, something new happened.",
    "But that was not the end of the story.",
    "A week later, {name} had another adventure.",
)
ENDINGS = (
    "From that day on, {name} and the {friend} were the best of friends.",
    "That night, {name} fell asleep with a smile.",
    "And {name} never forgot that day.",
    "{name} was very happy, and so was the {friend}.",
    "And they all lived happily ever after.",
    "In the evening, {name} went home and told everyone about it.",
)

PLOTS = (
    Plot(("a lost toy", "something lost", "helping"), (
        ("One day, {name} lost {his} {thing}.", "One morning, {name} could not find {his} {thing}."),
        ("{He} looked under the bed and behind the door, but it was not there.",
         "{He} looked everywhere, but it was gone.",
         "{He} searched the whole garden, but {he} did not find it."),
        ("Then {he} met {a_friend}.", "On the way, {he} met {a_friend}."),
        ('"Do not be sad," said the {friend}. "I will help you."',
         '"I can help you look," said the {friend}.'),
        ("Together they found the {thing} under a tree.", "Together they found the {thing} beside the path.",
         "Soon they saw the {thing} in the tall grass."),
        ('"Thank you!" said {name}.', "{name} thanked the {friend} and danced with joy."),
    )),
    Plot(("friendship", "a new friend", "two friends"), (
        ("{name} had no one to play with, and {he} felt lonely.", "{name} often played alone and wished for a friend."),
        ("One day, {a_friend} came down the road.", "One day, {he} saw {a_friend} sitting on a stone."),
        ('"Will you play with me?" asked {name}.', '"Hello," said {name}. "Do you want to play?"'),
        ('"I would love to," said the {friend}.', '"Yes, with pleasure," said the {friend}.'),
        ("They played with {a_thing} until the sun went down.", "They ran and laughed the whole afternoon.",
         "They shared some {food} and told each other jokes."),
    )),
    Plot(("the dark", "being brave", "the night"), (
        ("{name} was afraid of the dark.", "Every night, {name} was afraid of the dark."),
        ("One night, {he} heard a strange noise outside.", "One night, there was a soft knock at the door."),
        ("{He} took {a_thing} and opened the door very slowly.", "{He} took a deep breath and went to look."),
        ("It was only {a_friend} who had lost the way home.", "There stood {a_friend} who was cold and hungry."),
        ('"Come in," said {name}, and {he} gave the {friend} some {food}.',
         '"You are safe here," said {name}.'),
        ("After that, {name} was not afraid any more.", "Now {name} knew that the dark was nothing to fear."),
    )),
    Plot(("a treasure", "an adventure", "a secret"), (
        ("One day, {name} found an old map.", "One morning, {name} found a map in an old box."),
        ("The map showed the way to a treasure on the hill.", "It showed a path that led to a hidden cave."),
        ("{He} asked {a_friend} to come along.", "{He} packed some {food} and set off with {a_friend}."),
        ("They walked for hours and crossed a wide river.", "They climbed over rocks and jumped over a stream."),
        ("At last they found a chest, and in it was {a_thing}.", "At the end of the path they found {a_thing}."),
        ('"The best treasure is a good friend," said the {friend}.', '"We did it!" cried {name}.'),
    )),
    Plot(("sharing", "food", "being kind"), (
        ("One day, {name} had a big basket of {food}.", "One morning, {name} made some {food}."),
        ("{He} met {a_friend} who was very hungry.", "On the road {he} met {a_friend} who had nothing to eat."),
        ("{name} thought for a moment, and then {he} shared the {food}.",
         '"Please take half of my {food}," said {name}.'),
        ("The {friend} was so glad that a tear fell to the ground.", '"You are very kind," said the {friend}.'),
        ("The next day, the {friend} came back with {a_thing} as a gift.",
         "Later, the {friend} gave {name} {a_thing} to say thank you."),
    )),
    Plot(("a storm", "the rain", "the weather"), (
        ("One day, dark clouds came and it began to rain.", "One afternoon, a big storm came over the hills."),
        ("The wind was so strong that it blew away {his} {thing}.", "{name} ran to find a dry place."),
        ("Under a bridge {he} found {a_friend} who was wet and cold.",
         "In an old barn {he} met {a_friend} who was hiding from the rain."),
        ("They sat close together and sang songs to stay warm.", "They waited together and told each other stories."),
        ("When the storm was over, a bright rainbow stood in the sky.",
         "At last the sun came out, and everything was shining."),
    )),
    Plot(("a garden", "a flower", "patience"), (
        ("One spring day, {name} planted a small seed.", "One day, {a_friend} gave {name} a small seed."),
        ("{He} gave it water every morning and waited.", "Every day {he} gave it water and sang to it."),
        ("For a long time nothing happened, and {name} became sad.", "Days went by, but nothing grew."),
        ('"Be patient," said the {friend}. "Good things take time."',
         '"Wait a little longer," said the {friend}.'),
        ("Then one morning there was a beautiful {colour} flower.", "One day, a tall {colour} flower stood there."),
        ("Everyone came to look at it.", "It was the most beautiful flower of all."),
    )),
    Plot(("learning", "trying again", "a dream"), (
        ("{name} had a dream. {He} wanted to learn to {skill}.", "More than anything, {name} wanted to {skill}."),
        ("{He} tried and tried, but it did not work.", "The first time {he} tried, everyone laughed."),
        ("{He} sat down and wanted to give up.", "{name} was sad and wanted to stop."),
        ('"Try once more," said {a_friend}. "I will show you how."',
         "Then {a_friend} came and showed {him} how to do it."),
        ("{name} practised every day.", "Day after day they practised together."),
        ("In the end, {he} could {skill} better than anyone.", "And one day, {name} could really {skill}!"),
    )),
    Plot(("a birthday", "a party", "a surprise"), (
        ("It was {his} birthday, but nobody said a word about it.", "On {his} birthday, {name} woke up early."),
        ("{name} thought that everyone had forgotten it.", "The house was empty and very quiet."),
        ("{He} walked slowly into the garden.", "{He} went outside to look for {his} friends."),
        ('"Surprise!" cried the {friend}, and all the others came out.',
         "Suddenly {a_friend} jumped out and sang a song for {him}."),
        ("There was {food} for everyone, and {name} got {a_thing}.",
         "They gave {him} {a_thing}, and they ate {food} together."),
    )),
    Plot(("the moon", "the stars", "bedtime"), (
        ("Every evening, {name} looked up at the moon.", "One evening, {name} could not sleep."),
        ('"I wish I could visit the moon," said {name}.', '"How far away is the moon?" {he} asked.'),
        ("{A_friend} heard this and had an idea.", '"I know what to do," said {a_friend}.'),
        ("They went down to the lake, and there the moon lay on the water.",
         "They built a ladder and climbed to the top of the highest hill."),
        ("{name} waved to the moon, and it seemed to smile.",
         "The moon was so close that {name} could almost touch it."),
    )),
)
SKILLS = ("swim", "sing", "dance", "fly", "paint", "skate", "play the drum", "climb")


def with_article(phrase: str) -> str:
    """The phrase behind its indefinite article."""
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def _cast(rng: random.Random, noun: str | None, name: str | None) -> dict[str, str]:
    if name is None:
        name = rng.choice(GIRLS if noun in ("girl", "princess", "queen", "hen", "cow") else
                          BOYS if noun in ("boy", "prince", "king", "knight", "wizard") else GIRLS + BOYS)
    female = name in GIRLS
    if noun is None:
        noun = rng.choice(("girl" if female else "boy", rng.choice(HEROES)))
        if noun in ("princess", "queen", "prince", "king"):
            noun = "fox"
    friend = rng.choice([animal for animal in ANIMALS if animal != noun])
    a_friend = with_article(f"{rng.choice(FRIEND_TRAITS)} {friend}")
    thing = rng.choice(THINGS)
    colour = rng.choice(COLOURS)
    he, him, his = ("she", "her", "her") if female else ("he", "him", "his")
    return {
        "name": name, "a_hero": with_article(f"{rng.choice(HERO_TRAITS)} {noun}"), "friend": friend,
        "a_friend": a_friend, "A_friend": a_friend[0].upper() + a_friend[1:], "place": rng.choice(PLACES),
        "thing": thing, "a_thing": with_article(f"{colour} {thing}"), "colour": colour, "food": rng.choice(FOODS),
        "skill": rng.choice(SKILLS), "he": he, "He": he.title(), "him": him, "his": his, "His": his.title(),
    }


def _body(rng: random.Random, plot: Plot, cast: dict[str, str]) -> list[str]:
    """The plot's sentences.  The friend enters once with an article, and is `the friend` from then on."""
    told: list[str] = []
    known = False
    for wordings in plot.sentences:
        wording = rng.choice(wordings)
        if known:
            wording = wording.replace("{a_friend}", "the {friend}").replace("{A_friend}", "The {friend}")
        elif "{friend}" in wording and "{a_friend}" not in wording:
            wording = wording.replace("the {friend}", "{a_friend}", 1)
        known = known or "friend}" in wording
        told.append(wording.format_map(cast))
    return told


def story(rng: random.Random, noun: str | None = None, name: str | None = None,
          topic: str | None = None, long: bool = False) -> str:
    """One story, optionally about a given hero, name or topic."""
    cast = _cast(rng, noun, name)
    plots = [plot for plot in PLOTS if topic is None or topic in plot.topics]
    first = rng.choice(plots)
    opening = OPENINGS[0 if rng.random() < 0.4 else rng.randrange(len(OPENINGS))]
    paragraphs = [[opening.format_map(cast), *_body(rng, first, cast)]]
    if long:
        second = rng.choice([plot for plot in PLOTS if plot is not first])
        cast = {**_cast(rng, noun, cast["name"]), "name": cast["name"]}
        paragraphs.append([rng.choice(BRIDGES).format_map(cast), *_body(rng, second, cast)])
    paragraphs[-1].append(rng.choice(ENDINGS).format_map(cast))
    return "\n\n".join(" ".join(paragraph) for paragraph in paragraphs)


def topics() -> tuple[str, ...]:
    """Every topic that some plot can tell."""
    return tuple(topic for plot in PLOTS for topic in plot.topics)
