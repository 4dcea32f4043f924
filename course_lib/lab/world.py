"""The small world that the shipped model was trained in and that needle prompts are made of.

Notes are one sentence a line: facts about people ("Zara's favorite food is ramen."), variable
assignments ("VAR zamu = 48213.") and filler ("The old bridge faces the quiet river."). Every
random choice comes from a `random.Random` that the caller seeds, so a prompt is a function of
its seed on every supported Python.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

NAMES: tuple[str, ...] = tuple(
    "Zara Leo Olive Mia Noah Emma Liam Ava Ethan Sofia Lucas Chloe Mason Ella Logan Grace Owen "
    "Lily Henry Nora Jack Ruby Felix Alice Oscar Clara Hugo Iris Simon Vera Adam Julia Bruno "
    "Wendy Carl Diana Erik Fiona Gavin Helen Ivan Jane Kevin Laura Marco Nina Otto Paula Quinn "
    "Rosa Stefan Tina Ulrich Violet Walter Xenia Yusuf Zoe Anton Bella Cyrus Daisy Elias Freya "
    "George Hazel Isaac Jade Karl Luna Milo Nadia Omar Penny Ralf Selma Tomas Uma Victor Willa "
    "Xavier Yara Zeno Amara Boris Celia Dario Edith Fabio Greta Harald Ingrid Jonas Kira "
    "Lorenz Maya Nils Odette Pablo Rania Samir Thea Urban Viola Wilma Yves Zelda Amir Birgit "
    "Conrad Dora Emil Frida Gustav Hilda Igor Joan Kurt Leila Moritz".split()
)

# Closed attributes draw from a list; the two open ones draw a fresh number or a made-up word.
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "favorite food": tuple(
        "ramen rice soup bread cheese salad pizza pasta curry tofu sushi noodles beans tacos "
        "waffles pancakes dumplings risotto lasagna porridge omelet kebab paella goulash".split()
    ),
    "favorite color": tuple(
        "red blue green yellow purple orange pink brown black white gray silver gold teal "
        "maroon navy olive coral beige indigo crimson turquoise lavender amber".split()
    ),
    "favorite animal": tuple(
        "owl fox cat dog horse rabbit tiger lion panda otter dolphin whale eagle falcon parrot "
        "turtle lizard hamster badger beaver hedgehog squirrel penguin koala".split()
    ),
    "favorite drink": tuple(
        "tea coffee milk juice water cocoa lemonade cider soda espresso matcha kefir punch "
        "tonic syrup nectar smoothie latte eggnog broth mead sherbet malt cordial".split()
    ),
    "favorite sport": tuple(
        "tennis soccer hockey rugby golf chess rowing boxing judo karate fencing sailing "
        "surfing skiing cycling archery cricket baseball volleyball climbing running swimming "
        "wrestling bowling".split()
    ),
    "home city": tuple(
        "Paris London Berlin Madrid Rome Vienna Prague Oslo Dublin Lisbon Athens Cairo Tokyo "
        "Seoul Lima Boston Chicago Denver Sydney Toronto Havana Nairobi Warsaw Helsinki".split()
    ),
    "lucky number": (),
    "secret word": (),
}

_ADJECTIVES = (
    "old quiet small bright heavy narrow gentle distant wooden golden broken hidden empty frozen "
    "ancient curious steady hollow dusty crooked"
).split()
_NOUNS = (
    "bridge river garden tower lantern mountain valley market harbor forest window ladder engine "
    "castle orchard meadow tunnel library village fountain"
).split()
_VERBS = "faces guards crosses watches follows hides reaches borders shelters answers".split()

_ONSETS = "b d f g h j k l m n p r s t v w z".split()
_VOWELS = "a e i o u".split()
SYLLABLES: tuple[str, ...] = tuple(c + v for c in _ONSETS for v in _VOWELS)


@dataclass(frozen=True)
class Fact:
    """One fact of the world: `name`'s `attribute` is `value`."""

    name: str
    attribute: str
    value: str

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """The sentence as (role, text) parts; roles are name, attribute, value and glue."""
        return (
            ("name", self.name),
            ("glue", "'s"),
            ("attribute", " " + self.attribute),
            ("glue", " is"),
            ("value", " " + self.value),
            ("glue", "."),
        )

    @property
    def sentence(self) -> str:
        return "".join(text for _, text in self.parts)

    @property
    def beginning(self) -> str:
        """The sentence up to its value."""
        return self.sentence.removesuffix(f" {self.value}.")

    @property
    def question(self) -> str:
        return f"What is {self.name}'s {self.attribute}?"


@dataclass(frozen=True)
class Assignment:
    """One line of a variable chain: `variable` takes `source`, a number or another variable."""

    variable: str
    source: str

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """The sentence as (role, text) parts; roles are variable, source and glue."""
        return (
            ("glue", "VAR"),
            ("variable", " " + self.variable),
            ("glue", " ="),
            ("source", " " + self.source),
            ("glue", "."),
        )

    @property
    def sentence(self) -> str:
        return "".join(text for _, text in self.parts)


def chain_question(chain: list[Assignment]) -> str:
    """The question that a chain of assignments answers; it states how many variables to list."""
    return f"List the {len(chain)} variables that hold {chain[0].source}."


def chain_answer(chain: list[Assignment]) -> str:
    """The variables of a chain in order of assignment: "VAR zamu, VAR qiro."."""
    return ", ".join("VAR " + a.variable for a in chain) + "."


def is_held_out(word: str) -> bool:
    """Whether a made-up word is reserved for evaluation: one in eight, never used in training."""
    return zlib.crc32(word.lower().encode()) % 8 == 0


def made_up_word(
    rng: random.Random, *, held_out: bool = False, syllables: int | None = None
) -> str:
    """A pronounceable word of two or three syllables, from the training or the held-out share."""
    while True:
        n = syllables if syllables is not None else rng.choice((2, 2, 3))
        word = "".join(rng.choice(SYLLABLES) for _ in range(n))
        if is_held_out(word) == held_out:
            return word


def number(rng: random.Random, digits: int = 4) -> str:
    """A decimal number of exactly `digits` digits."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def random_value(rng: random.Random, attribute: str, *, held_out: bool = False) -> str:
    """A value for `attribute`; `held_out=True` gives a made-up word never seen in training."""
    if held_out:
        return made_up_word(rng, held_out=True)
    if attribute == "lucky number":
        return number(rng)
    if attribute == "secret word":
        return made_up_word(rng)
    return rng.choice(ATTRIBUTES[attribute])


def random_name(rng: random.Random, *, made_up: bool = False, held_out: bool = False) -> str:
    """A person's name: from `NAMES`, or made up (and, if `held_out`, never seen in training)."""
    if made_up or held_out:
        return made_up_word(rng, held_out=held_out).capitalize()
    return rng.choice(NAMES)


def filler_sentence(rng: random.Random) -> str:
    """A sentence that no question asks about."""
    a, b = rng.choice(_ADJECTIVES), rng.choice(_ADJECTIVES)
    n, m = rng.choice(_NOUNS), rng.choice(_NOUNS)
    verb = rng.choice(_VERBS)
    form = rng.randrange(4)
    if form == 0:
        return f"The {n} {verb} the {m}."
    if form == 1:
        return f"The {a} {n} {verb} the {m}."
    if form == 2:
        return f"The {a} {n} {verb} the {b} {m}."
    return f"Every {n} {verb} the {b} {m}."


def vocabulary_words() -> tuple[str, ...]:
    """Every word of the world, in a fixed order; the tokenizer makes each of them one token."""
    words: list[str] = list(NAMES)
    for attribute, values in ATTRIBUTES.items():
        words.extend(attribute.split())
        words.extend(values)
    words.extend(_ADJECTIVES + _NOUNS + _VERBS)
    words.extend("The the Every is What List variables that hold VAR user assistant system".split())
    words.extend("Read these notes Answer Question and Q A".split())
    return tuple(dict.fromkeys(words))
