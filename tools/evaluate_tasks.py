"""The generated tasks: what is hidden in a context, what is asked, and the answer. No model, no tokenizer.

After RULER (C. Hsieh et al.: RULER: What's the Real Context Size of Your Long-Context Language Models? COLM 2024), in
code of our own, with answers whose every token the context determines, so that they can be teacher-forced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from kvcompile.tools import evaluate_text as words

_LOOKED_AT = 200  # sentences, for two of some length in a row


class Material(NamedTuple):
    """facts are placed between the pieces of `filler`, in this order; `prefix` and the answers, listed, are the reply.

    Without answers the reply is how the filler goes on.
    """

    facts: list[str]
    filler: Iterator[str]
    question: str
    prefix: str
    answers: list[str]

    @property
    def answer(self) -> str:
        return _listed(self.answers)


Filler = Callable[[Random], Iterator[str]]


def single(rng: Random, filler: Filler) -> Material:
    """One number under one key."""
    return _needles(rng, filler, keys=1, values=1, asked=1)


def multikey(rng: Random, filler: Filler) -> Material:
    """One number under a key, among seven others under keys of their own."""
    return _needles(rng, filler, keys=8, values=1, asked=1)


def multivalue(rng: Random, filler: Filler) -> Material:
    """All three numbers under one key, in their order, among two other keys of three."""
    return _needles(rng, filler, keys=3, values=3, asked=1)


def multiquery(rng: Random, filler: Filler) -> Material:
    """The numbers under three keys of six, in the order of the question."""
    return _needles(rng, filler, keys=6, values=1, asked=3)


def variables(rng: Random, filler: Filler) -> Material:
    """The three variables of a chain of assignments, in its order, by the value; beside a chain of another value."""
    chains, facts = [], []
    names = rng.sample(words.NOUNS, 6)
    for chain in (names[:3], names[3:]):
        value = str(rng.randrange(10_000, 100_000))
        chains.append((chain, value))
        facts.append([f"The variable {chain[0].upper()} is set to {value}."])
        for before, after in zip(chain, chain[1:], strict=False):
            facts[-1].append(f"The variable {after.upper()} is set to the value of {before.upper()}.")
    (asked, value), _ = chains
    return Material(
        _merged(rng, facts),
        filler(rng),
        f"Which variables have the value {value} by the assignments in the text above, directly or through another?",
        f"The variables that have the value {value}, directly or through another, are",
        [name.upper() for name in asked],
    )


def common_words(rng: Random, filler: Filler) -> Material:
    """The three words that come again and again in a list of others, in alphabetical order."""
    common = sorted(rng.sample(words.NOUNS, 3))
    return _counted(rng, dict.fromkeys(common, 4), 12, common, "in alphabetical order", "most common")


def frequent_words(rng: Random, filler: Filler) -> Material:
    """The three most frequent coded words, the most frequent first."""
    coined = words.coded_words(rng)
    top = [next(coined) for _ in range(3)]
    return _counted(rng, dict(zip(top, (9, 6, 4), strict=True)), 8, top, "the most frequent first", "most frequent")


def copying(rng: Random, filler: Filler) -> Material:
    """The sentence that follows one that is quoted, both from the text itself: a question over any text."""
    text = filler(rng)
    quoted, wanted = next(text), next(text)
    for _ in range(_LOOKED_AT):  # a text may have short sentences alone
        if len(quoted.split()) >= 6 and len(wanted.split()) >= 8:
            break
        quoted, wanted = wanted, next(text)
    reply = " ".join(wanted.split()[:24])
    return Material(
        [f"{quoted} {wanted}"],
        text,
        f'Which sentence comes directly after "{quoted}" in the text above? Quote it.',
        f'The sentence that comes directly after "{quoted}" is:',
        [reply],
    )


def cloze(rng: Random, filler: Filler) -> Material:
    """The word that is left out of a sentence of the text: a question over any text whose answer is one word."""
    text = filler(rng)
    asked, at = next(text), []
    for _ in range(_LOOKED_AT):
        parts = asked.split()
        at = [i for i, word in enumerate(parts) if i and len(word) > 5 and word.isalpha() and parts.count(word) == 1]
        if at and 8 <= len(parts) <= 40:
            break
        asked = next(text)
    parts = asked.split()
    left_out = rng.choice(at or range(len(parts)))
    with_gap = " ".join([*parts[:left_out], "____", *parts[left_out + 1 :]])
    return Material(
        [asked],
        text,
        f'Which word is left out of this sentence of the text above: "{with_gap}"?',
        "The word that is left out is",
        [parts[left_out]],
    )


def continuation(rng: Random, filler: Filler) -> Material:
    """How the text goes on: what a language model is measured by, with its context pruned."""
    return Material([], filler(rng), "Continue the text above.", "", [])


TASKS: dict[str, Callable[[Random, Filler], Material]] = {
    "single": single,
    "multi-key": multikey,
    "multi-value": multivalue,
    "multi-query": multiquery,
    "variables": variables,
    "common-words": common_words,
    "frequent-words": frequent_words,
    "copying": copying,
    "cloze": cloze,
    "continuation": continuation,
}


def _needles(rng: Random, filler: Filler, keys: int, values: int, asked: int) -> Material:
    names = _keys(rng, keys)
    numbers = {name: [str(rng.randrange(1_000_000, 10_000_000)) for _ in range(values)] for name in names}
    facts = [f"One of the special magic numbers for {name} is {number}." for name in names for number in numbers[name]]
    rng.shuffle(facts)
    wanted = names[:asked]
    in_text = {name: [fact.rsplit(" ", 1)[1][:-1] for fact in facts if f" {name} is " in fact] for name in wanted}
    which = _listed(wanted)
    plural = "s" if asked * values > 1 else ""
    verb = "are" if plural else "is"
    return Material(
        facts,
        filler(rng),
        f"What {verb} the special magic number{plural} for {which} mentioned in the text above?",
        f"The special magic number{plural} for {which} mentioned in the text above {verb}",
        [number for name in wanted for number in in_text[name]],
    )


def _keys(rng: Random, count: int) -> list[str]:
    pairs = zip(rng.sample(words.ADJECTIVES, count), rng.sample(words.NOUNS, count), strict=True)
    return [f"{adjective}-{noun}" for adjective, noun in pairs]


def _counted(rng: Random, counts: dict[str, int], others: int, answer: list[str], order: str, kind: str) -> Material:
    """Words in blocks, shuffled: in each block every word of `counts` so many times, and `others` that come once."""

    def filler() -> Iterator[str]:
        coined = words.coded_words(rng)
        while True:
            block = [word for word, count in counts.items() for _ in range(count)]
            while len(block) < sum(counts.values()) + others:
                if (word := next(coined)) not in counts:
                    block.append(word)
            rng.shuffle(block)
            yield from block

    return Material(
        [],
        filler(),
        f"Which are the three {kind} words in the text above, {order}?",
        f"The three {kind} words in the text above, {order}, are",
        answer,
    )


def _merged(rng: Random, lists: list[list[str]]) -> list[str]:
    """All items in random order, those of each list in their own."""
    turns = [index for index, items in enumerate(lists) for _ in items]
    rng.shuffle(turns)
    streams = [iter(items) for items in lists]
    return [next(streams[turn]) for turn in turns]


def _listed(items: list[str]) -> str:
    return " and ".join([*filter(None, [", ".join(items[:-1])]), *items[-1:]])
