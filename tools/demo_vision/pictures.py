"""Pictures of shapes and digits, and questions about them, from which the demo model for images learns.

A picture has one thing; a conversation may have two pictures. Answers are always in the same form, because a model
this small learns one wording of an answer, and several of a question.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

COLORS = {
    "red": (220, 30, 30),
    "green": (30, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (245, 205, 30),
    "orange": (245, 135, 20),
    "purple": (140, 50, 170),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
SIDES = (96, 320)
"""Shortest and longest side of a picture in pixels."""


def _fonts() -> list[ImageFont.FreeTypeFont]:
    """Return Pillow's own font, and those of the system's that are there."""
    found = [ImageFont.load_default(20)]
    for name in ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSerif-Bold.ttf"):
        with suppress(OSError):
            found.append(ImageFont.truetype(name, 20))
    return [font for font in found if isinstance(font, ImageFont.FreeTypeFont)]


FONTS = _fonts()


@dataclass(frozen=True)
class Thing:
    """A shape, or a digit (one character), of one color."""

    name: str
    color: str

    @property
    def is_digit(self) -> bool:
        return self.name.isdigit()

    def __str__(self) -> str:
        """Return the thing with its article."""
        return f"{'an' if self.color[0] in 'aeiou' else 'a'} {self.color} {self.name}"


def draw_thing(rng: random.Random) -> Thing:
    """Draw a thing: as often a shape as a digit."""
    return Thing(rng.choice((rng.choice(SHAPES), rng.choice("0123456789"))), rng.choice(list(COLORS)))


def _polygon(name: str) -> list[tuple[float, float]]:
    """Return the corners of a shape around 0, of radius 1."""
    if name == "triangle":
        return [(0.0, -1.0), (0.95, 0.8), (-0.95, 0.8)]
    if name == "square":
        return [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)]
    if name == "cross":
        a, b = 0.28, 0.95
        quarter = [(a, -b), (a, -a), (b, -a), (b, a), (a, a), (a, b), (-a, b), (-a, a), (-b, a), (-b, -a), (-a, -a)]
        return [*quarter, (-a, -b)]
    turns = [(math.pi * k / 5, 1.0 if k % 2 == 0 else 0.42) for k in range(10)]
    return [(radius * math.sin(angle), -radius * math.cos(angle)) for angle, radius in turns]


Place = tuple[float, float, float, float]
"""The middle of a thing and half its width and height, as shares of the picture's width and height."""


def draw(rng: random.Random, thing: Thing) -> tuple[Image.Image, Place]:
    """Return a picture of the thing, of random size, background and place, and the thing's place."""
    width, height = rng.randint(*SIDES), rng.randint(*SIDES)
    if max(width, height) > 2 * min(width, height):
        height = width
    back = tuple(rng.randint(215, 255) for _ in range(3)) if rng.random() < 0.5 else (255, 255, 255)
    picture = Image.new("RGB", (width, height), back)
    pen = ImageDraw.Draw(picture)
    radius = min(width, height) / 2 * rng.uniform(0.45, 0.92)
    x, y = (side / 2 + rng.uniform(-1, 1) * (side / 2 - radius) for side in (width, height))
    red, green, blue = (min(255, max(0, value + rng.randint(-20, 20))) for value in COLORS[thing.color])
    fill = (red, green, blue)
    if thing.is_digit:
        font = rng.choice(FONTS).font_variant(size=int(radius * 2.2))
        pen.text((x, y), thing.name, fill=fill, font=font, anchor="mm")
    elif thing.name == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
    else:
        pen.polygon([(x + radius * px, y + radius * py) for px, py in _polygon(thing.name)], fill=fill)
    return picture, (x / width, y / height, radius * (0.55 if thing.is_digit else 0.8) / width, radius * 0.8 / height)


Exchange = tuple[str, str]
DESCRIBE = (
    *("What is in the picture?", "What is in this picture?", "What's in the picture?", "Describe the picture."),
    *("What is in the image?", "What is in this image?", "What's in this image?", "Describe this image."),
    *("What do you see?", "What is this?", "What is it?", "What does the picture show?"),
)
DESCRIBE_NTH = ("What is in the {} picture?", "Describe the {} picture.", "What is in the {} image?")
DESCRIBE_BOTH = (
    *("What is in the pictures?", "What is in these pictures?", "What is in these images?", "Describe both pictures."),
    *("Compare the pictures.", "What do you see in the pictures?", "What is the difference?"),
)


def _article(name: str) -> str:
    return f"{'an' if name == '8' else 'a'} {name}"


def description(rng: random.Random, thing: Thing) -> Exchange:
    """Draw a question for what is in a picture."""
    text = str(thing)
    return rng.choice(DESCRIBE), f"{text[0].upper()}{text[1:]}."


def _color(rng: random.Random, thing: Thing) -> Exchange:
    asks = ("What color is the {}?", "Which color is the {}?", "What is the color of the {}?")
    return rng.choice(asks).format(thing.name), f"The {thing.name} is {thing.color}."


def _digit(rng: random.Random, thing: Thing) -> Exchange:
    ask = rng.choice(("Which digit is it?", "Which digit do you see?", "What digit is in the picture?"))
    return ask, f"The digit is {thing.name}." if thing.is_digit else "There is no digit."


def _is_there(rng: random.Random, thing: Thing) -> Exchange:
    name = thing.name if rng.random() < 0.5 else rng.choice((*SHAPES, *"0123456789"))
    ask = rng.choice(("Is there {}?", "Do you see {}?", "Is there {} in the picture?")).format(_article(name))
    return ask, f"Yes, {thing}." if thing.name == name else f"No, there is no {name}."


KINDS: dict[str, Callable[[random.Random, Thing], Exchange]] = {
    "description": description,
    "color": _color,
    "digit": _digit,
    "is there": _is_there,
}


def about(rng: random.Random, thing: Thing) -> Exchange:
    """Draw a question about a picture, and its answer."""
    (make,) = rng.choices(list(KINDS.values()), (5, 2, 2, 2))
    return make(rng, thing)


def varied(rng: random.Random, ask: str) -> str:
    """Return a question, in some cases without its mark, or in small letters."""
    if rng.random() < 0.2:
        ask = ask[:-1]
    return ask.lower() if rng.random() < 0.2 else ask


def about_two(rng: random.Random, first: Thing, second: Thing) -> Exchange:
    """Draw a question about one of two pictures or both, and its answer."""
    word, thing = rng.choice((("first", first), ("second", second)))
    if first.name != second.name and rng.random() < 0.3:
        return f"Which picture has {_article(thing.name)}?", f"The {word} picture."
    if rng.random() < 0.4:
        return rng.choice(DESCRIBE_BOTH), f"First {first}, then {second}."
    return rng.choice(DESCRIBE_NTH).format(word), description(rng, thing)[1]
