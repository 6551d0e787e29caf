"""Prompts for speculative decoding: some whose answer copies the prompt, some whose answer does not."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["GROUNDED", "PROMPTS", "Prompt", "high_entropy_prompts", "repetitive_prompts"]


@dataclass(frozen=True)
class Prompt:
    """A prompt: a user message for a chat model, or the beginning of a text."""

    kind: str
    text: str
    chat: bool = True

    def ids(self, tokenizer: Any) -> list[int]:
        """The token ids of the prompt; without a chat template, those of the text."""
        if not self.chat or not tokenizer.chat_template:
            return list(tokenizer(self.text)["input_ids"])
        turns = [{"role": "user", "content": self.text}]
        whole = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
        return list(whole["input_ids"])


_HARBOUR = """\
The harbour at Velm opens at six in the morning. The first boats to leave are the small ones, which fish \
close to the shore and come back before noon. The large boats leave after eight, because their crews live \
in the villages behind the hill and the first bus does not arrive before half past seven. Every boat must \
report to the harbour office by radio when it passes the outer wall, and again when it comes back. The \
office keeps a list of all boats at sea. When a boat does not report by sunset, the office calls it on two \
channels, then calls the boats nearby, and then sends the rescue boat, which lies ready at the north pier \
with a crew of four. In the last ten years the rescue boat has gone out on ninety-one nights. It has come \
back with nobody on eleven of them, and on none of those was anybody lost."""

_BREAD = """\
To make the dark bread of the valley you need one kilogram of rye flour, half a kilogram of wheat flour, \
twenty grams of salt, a cup of sourdough and about a litre of warm water. In the evening mix the sourdough \
with half of the rye flour and half of the water, cover the bowl with a cloth and leave it near the stove. \
In the morning add the rest of the flour, the rest of the water and the salt, and knead the dough for \
fifteen minutes. Put the dough into a basket that is dusted with flour and let it rise for two hours. Heat \
the oven as hot as it gets, turn the dough out onto a hot stone and bake it for fifteen minutes, then turn \
the oven down and bake the bread for another fifty minutes. The bread is done when it sounds hollow as you \
knock on it. Let the bread rest for a day before you cut it."""

_LIBRARY = """\
The town library has been in the old mill since 1974. It holds forty thousand books, of which about a third \
are for children. Last year the library lent out one hundred and twenty thousand books, more than in any \
year before. The number of visitors rose by nine per cent. The librarians think that the new reading room, \
which opened in March, is the main reason: it has sixty seats, it is quiet, and it stays open until ten at \
night. The town council has now agreed to pay for a second reading room. It will be built where the wheel \
of the mill used to be, and it will have a window over the river. The work is to begin in April and to be \
finished within a year. While the work lasts, the library will stay open, but the children's books will be \
moved to the school next door."""

_BATTERY = """\
A team of engineers has tested how long the batteries of delivery bicycles last in cold weather. They rode \
forty bicycles through the city for three winters and charged the batteries every night. At ten degrees \
above zero a full battery was enough for sixty-two kilometres. At zero degrees it was enough for fifty-one \
kilometres, and at ten degrees below zero it was enough for only thirty-seven kilometres. Batteries that \
were kept indoors overnight lasted a fifth longer on the next morning than batteries that stayed outside. \
After three winters the batteries held eighty-four per cent of what they held when they were new. The \
engineers advise the companies to keep the batteries indoors, to ride the first kilometre slowly, and to \
replace a battery when it holds less than seventy per cent."""

_SHAPES = '''\
class Square:
    """A square, given by the length of its side."""

    def __init__(self, side):
        if side <= 0:
            raise ValueError("side must be greater than 0")
        self.side = side

    def area(self):
        """The area of the square."""
        return self.side * self.side

    def perimeter(self):
        """The perimeter of the square."""
        return 4 * self.side

    def describe(self):
        """The square in words."""
        return f"a square with area {self.area()} and perimeter {self.perimeter()}"


class Circle:
    """A circle, given by the length of its radius."""

    def __init__(self, radius):
        if radius <= 0:
            raise ValueError("radius must be greater than 0")
        self.radius = radius

    def area(self):
        """The area of the circle."""
        return 3.14159 * self.radius * self.radius

    def perimeter(self):
        """The perimeter of the circle."""
        return 2 * 3.14159 * self.radius

    def describe(self):
        """The circle in words."""
        return f"a circle with area {self.area()} and perimeter {self.perimeter()}"


class Rectangle:
    """A rectangle, given by the lengths of its sides."""
'''

_SETTINGS = """\
def read_settings(path):
    settings = {}
    with open(path) as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            name, value = line.split("=", 1)
            name = name.strip()
            value = value.strip()
            if name == "host":
                settings["host"] = value
            elif name == "port":
                settings["port"] = int(value)
            elif name == "timeout":
                settings["timeout"] = float(value)
            elif name == "retries":
                settings["retries"] = int(value)
            elif name == "user":
                settings["user"] = value
            elif name == "folder":
                settings["folder"] = value
            else:
                raise ValueError(f"unknown setting: {name}")
    if "host" not in settings:
        raise ValueError("the setting host is missing")
    if "port" not in settings:
        raise ValueError("the setting port is missing")
    return settings"""

PROMPTS: tuple[Prompt, ...] = (
    Prompt("edit", f"Write this text again, word for word, but call the place Orm, not Velm:\n\n{_HARBOUR}"),
    Prompt("summarise", f"Summarise this text in its own words, in five or six sentences:\n\n{_LIBRARY}"),
    Prompt("code", _SHAPES, chat=False),
    Prompt("edit", f"Correct the spelling of this text, and write all of it out again:\n\n{_BREAD}"),
    Prompt(
        "code",
        "Here is a Python function:\n\n```python\n"
        f"{_SETTINGS}\n```\n\nWrite the whole function again, and rename the variable `settings` to `found`.",
    ),
    Prompt("summarise", f"Which findings does this report state? Quote them.\n\n{_BATTERY}"),
)

GROUNDED: Mapping[str, tuple[Prompt, ...]] = {
    kind: tuple(one for one in PROMPTS if one.kind == kind) for kind in ("edit", "summarise", "code")
}

_OPENINGS = ("The last person to see", "Nobody had told the", "On a Tuesday, two", "It is said of")


def high_entropy_prompts(kind: str, count: int) -> Iterator[Prompt]:
    """Prompts to sample from at temperature 1.

    "digits" are random: the last ones always occur earlier, and what followed them there does not help.
    "free" text has only a few words to look up.
    """
    for at in range(count):
        digits = "".join(random.Random(at).choices("0123456789", k=250))
        text = digits if kind == "digits" else _OPENINGS[at % len(_OPENINGS)]
        yield Prompt(kind, text, chat=False)


_NAMES = ("Anna", "Boris", "Carla", "David", "Emma", "Felix", "Greta", "Hugo")
_PLACES = ("Paris", "Rome", "Berlin", "Madrid", "Vienna", "Oslo", "Athens", "Dublin")


def repetitive_prompts(count: int) -> Iterator[Prompt]:
    """Prompts of three equal lines and the beginning of a fourth, all of them different."""
    for at in range(count):
        name, place = _NAMES[at % 8], _PLACES[(at + at // 8) % 8]
        line = f"{name} took the early train from {place} to the coast and came back after dark.\n"
        yield Prompt("repetitive", line * 3 + name, chat=False)
