"""Text for generated tasks: sentences to hide things in, and words that are in none of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from random import Random

_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_LONGEST = 400  # characters of a piece: longer sentences are cut at a space, so that depths are fine-grained

_WORDS: dict[str, list[str]] = json.loads((files("kvcompile.tools") / "data" / "words.json").read_text("utf-8"))
ADJECTIVES, NOUNS = _WORDS["adjectives"], _WORDS["nouns"]


def sentences(text: str) -> list[str]:
    """The sentences of a text, long ones in pieces, white space as single spaces. Empty if it has none."""
    found = []
    for sentence in _SENTENCE.split(" ".join(text.split())):
        while len(sentence) > _LONGEST:
            cut = sentence.rfind(" ", 0, _LONGEST)
            cut = cut if cut > 0 else _LONGEST
            found.append(sentence[:cut])
            sentence = sentence[cut:].lstrip()
        if sentence:
            found.append(sentence)
    return found


def running(text: list[str], rng: Random) -> Iterator[str]:
    """The sentences from a random one on, and over again from the first."""
    start = rng.randrange(len(text))
    while True:
        yield from text[start:]
        start = 0


def generated(rng: Random) -> Iterator[str]:
    """Sentences without end, made of few words: little to hold on to, nothing that names a number."""
    while True:
        first, second = rng.sample(NOUNS, 2)
        yield (
            f"{rng.choice(_WORDS['times'])} the {rng.choice(ADJECTIVES)} {first} {rng.choice(_WORDS['verbs'])} the "
            f"{rng.choice(ADJECTIVES)} {second} {rng.choice(_WORDS['places'])}."
        )


def coded_words(rng: Random) -> Iterator[str]:
    """Words of no language, without end, none twice."""
    seen: set[str] = set()
    while True:
        word = "".join(rng.choice(_WORDS["syllables"]) for _ in range(4))
        if word not in seen:
            seen.add(word)
            yield word
