"""Template short stories for the demo corpus.

A story is an opening, the sentences of one plot and an ending with one cast: a hero with one name and one pronoun, and
a friend who is always "the fox". There are few names, things and wordings, so that a model with very few parameters
sees each often enough to keep a story consistent.
"""

from __future__ import annotations

import random

GIRLS = ("Anna", "Lily", "Mia", "Emma", "Rosa", "Lucy")
BOYS = ("Tom", "Ben", "Max", "Sam", "Leo", "Jack")
ANIMALS = ("cat", "dog", "fox", "bear", "rabbit", "mouse", "bird", "frog", "duck", "horse")
HEROES = (*ANIMALS, "robot", "dragon", "girl", "boy")
SLOTS = {
    "trait": ("little", "small", "brave", "happy", "kind"),
    "friendly": ("kind", "big", "wise", "friendly"),
    "place": ("near the forest", "by the sea", "in a small house", "on a farm", "in a village"),
    "thing": ("ball", "kite", "hat", "bell", "key", "book"),
    "food": ("bread", "soup", "cake", "honey"),
    "skill": ("swim", "sing", "dance", "paint"),
    "spot": ("under a tree", "behind a stone", "in the grass"),
}
FEMALE = {"he": "she", "He": "She", "his": "her"}
MALE = {"he": "he", "He": "He", "his": "his"}

OPENINGS = (
    "Once upon a time, there was a {trait} {hero} named {name}.",
    "Once upon a time, there was a {trait} {hero} named {name}.",
    "Once upon a time, a {trait} {hero} named {name} lived {place}.",
)
PLOTS = (
    "One day, {name} lost {his} {thing}. {He} looked everywhere, but {he} could not find it. "
    'Then {he} met a {friendly} {friend}. "I will help you," said the {friend}. '
    "Together they found the {thing} {spot}.",
    "{name} was alone and wanted a friend. One day, {he} saw a {friendly} {friend} by the road. "
    '"Do you want to play with me?" asked {name}. "Yes!" said the {friend}. '
    "They played with {his} {thing} until the sun went down.",
    "{name} was afraid of the dark. One night, {he} heard a sound outside. "
    '{He} opened the door and saw a {friendly} {friend}. "I am cold and hungry," said the {friend}. '
    "{name} gave the {friend} some {food} and a warm bed.",
    "One day, {name} found an old map. {He} showed it to a {friendly} {friend}. "
    "They walked over the hill and into the forest. There they found a box with a golden {thing}. "
    '"We did it!" said {name}.',
    'One day, {name} made some {food}. {He} met a {friendly} {friend}. "May I have some {food}?" asked the {friend}. '
    '{name} smiled and gave the {friend} half of it. "Thank you, you are very kind," said the {friend}.',
    "{name} wanted to learn to {skill}. {He} tried and tried, but {he} could not do it. "
    '"I will show you how," said a {friendly} {friend}. They worked hard every day. '
    "In the end, {name} could {skill} very well.",
    "One day, it began to rain, and {name} got very wet. {He} ran to a big tree. "
    "A {friendly} {friend} was sitting there. They told each other stories until the sun came out. "
    '"Look, a rainbow!" said {name}.',
)
ENDINGS = (
    "{name} and the {friend} were best friends from that day on.",
    "That night, {name} was very happy.",
    "{name} never forgot that day.",
)


def story(rng: random.Random, hero: str | None = None, name: str | None = None) -> str:
    """Return one story, optionally about a given hero or name."""
    if name is None:
        name = rng.choice(GIRLS if hero == "girl" else BOYS if hero == "boy" else GIRLS + BOYS)
    if hero is None:
        hero = rng.choice((*ANIMALS, "robot", "dragon", "girl" if name in GIRLS else "boy"))
    cast = {slot: rng.choice(choices) for slot, choices in SLOTS.items()}
    cast |= FEMALE if name in GIRLS else MALE
    cast |= {"name": name, "hero": hero, "friend": rng.choice([animal for animal in ANIMALS if animal != hero])}
    return " ".join(rng.choice(part) for part in (OPENINGS, PLOTS, ENDINGS)).format_map(cast)
