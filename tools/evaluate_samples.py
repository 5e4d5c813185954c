"""Samples for retrieval: a task's material as tokens of an exact length, with the question where it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from kvcompile.config import UsageError
from kvcompile.tools import evaluate_questions, evaluate_text
from kvcompile.tools.evaluate_questions import Asked
from kvcompile.tools.evaluate_tasks import TASKS, Filler, Material

POSITIONS = ("last", "first", "later")
_INTRO = "Read the following text carefully.\n"
_READ = "I have read the text."
_GIVEN, _CONTINUED = 8, 64  # tokens of a text's continuation: those that start the reply, those that are scored
_MARKS = "\x02A\x03", "\x02B\x03"


class Sample(NamedTuple):
    """Token ids. `prompt` is what is pruned; `later` comes after that (a turn, the reply's start); `answer` is scored.

    facts: where in `prompt` each fact begins and how many tokens it has, in the task's order. turn: how many tokens of
    `later` are a turn; the others start the reply. wanted: texts that a good reply has; none where any may go on.
    """

    task: str
    position: str
    prompt: list[int]
    later: list[int]
    answer: list[int]
    facts: list[tuple[int, int]]
    turn: int = 0
    wanted: tuple[str, ...] = ()

    @property
    def asked(self) -> list[int]:
        """What a server is given: everything before the reply, whose start a user does not write."""
        return self.prompt + self.later[: self.turn]


class Frame(NamedTuple):
    """What stands around a user's words: before them, between them and the reply, between reply and new turn."""

    head: str
    tail: str
    turn: str


def frame(tokenizer: Any, chat: bool) -> Frame:
    """That of the tokenizer's chat template, or of plain text.

    Raises UsageError for a tokenizer without a template, or with one that does not repeat the turns before the last.
    """
    if not chat:
        return Frame("", "\n\nAnswer:", f" {_READ}\n\n")
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError("the tokenizer has no chat template; give --plain for prompts without one")

    def rendered(*contents: str) -> str:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    one, two = rendered(_MARKS[0]), rendered(_MARKS[0], _READ, _MARKS[1])
    if one.count(_MARKS[0]) != 1 or not two.startswith(one) or two.count(_MARKS[1]) != 1:
        raise UsageError("the tokenizer's chat template changes earlier turns; give --plain for prompts without one")
    head, tail = one.split(_MARKS[0])
    return Frame(head, tail, two[len(one) :].split(_MARKS[1])[0])


class Generator:
    """Samples of one tokenizer: a function of (task, position, length, seed) alone.

    text: what the facts are hidden in, and what `copying` asks for; generated sentences without it. questions: what
    the task of that name asks, which there is with them alone.
    """

    def __init__(
        self, tokenizer: Any, text: str | None = None, chat: bool = True, questions: Sequence[Asked] = ()
    ) -> None:
        self._tasks = {**TASKS, evaluate_questions.TASK: evaluate_questions.task(questions)} if questions else TASKS
        self._tokenizer = tokenizer
        self._frame = frame(tokenizer, chat)
        first = [] if chat else tokenizer("", add_special_tokens=True)["input_ids"][:1]  # a template has its own
        self._first = [token for token in first if token == tokenizer.bos_token_id]
        self._filler = _filler(text)

    def sample(self, task: str, position: str, length: int, seed: int) -> Sample:
        """A sample whose prompt has exactly `length` tokens; the last filler piece is cut to fit.

        Raises UsageError if what is to be hidden does not fit.
        """
        rng = Random(f"{task} {length} {seed}")  # one context for all positions
        material = self._tasks[task](rng, self._filler)
        head, tail, turn = self._frame
        question = material.question
        before, after = f"{head}{_INTRO}", tail
        if position == "last":
            after = f"\n\n{question}{tail}"
        elif position == "first":
            before = f"{head}{question.replace('text above', 'following text')}\n"
        start, end = self._first + self._ids(before), self._ids(after)
        room = length - len(start) - len(end)
        body, facts, cut = self._body(material, rng, room, f"{task}: a prompt of {length} tokens")
        given, answer = self._reply(material) if material.answer else self._rest(material, cut)
        turn_ids = self._ids(f"{turn}{question}{tail}") if position == "later" else []
        placed = [(len(start) + at, count) for at, count in facts]
        wanted = tuple(material.answers)
        return Sample(task, position, start + body + end, turn_ids + given, answer, placed, len(turn_ids), wanted)

    def _body(
        self, material: Material, rng: Random, room: int, what: str
    ) -> tuple[list[int], list[tuple[int, int]], list[int]]:
        """Tokens of the context, where its facts are, and what was cut from its end."""
        facts = [self._ids(f" {fact}") for fact in material.facts]
        left = room - sum(map(len, facts))
        if left < 0:
            raise UsageError(f"{what} has no room for {len(facts)} facts; it is {-left} tokens short")
        filler: list[list[int]] = []
        cut: list[int] = []
        while left > 0:
            piece = self._ids(f" {next(material.filler)}")
            filler.append(piece[:left])
            cut = piece[left:]
            left -= len(filler[-1])
        slots = sorted(rng.randrange(max(1, len(filler))) for _ in facts)  # before which piece; the cut one is last
        body: list[int] = []
        placed = []
        for index in range(len(filler) + 1):
            while slots and slots[0] == index:
                slots.pop(0)
                fact = facts[len(placed)]
                placed.append((len(body), len(fact)))
                body += fact
            if index < len(filler):
                body += filler[index]
        return body, placed, cut

    def _reply(self, material: Material) -> tuple[list[int], list[int]]:
        """The tokens of the reply's start, and those of the answer, as they follow it in one text."""
        given, whole = self._ids(f"{material.prefix} "), self._ids(f"{material.prefix} {material.answer}")
        while whole[: len(given)] != given:
            given.pop()
        return given, whole[len(given) :]

    def _rest(self, material: Material, cut: list[int]) -> tuple[list[int], list[int]]:
        while len(cut) < _GIVEN + _CONTINUED:
            cut = cut + self._ids(f" {next(material.filler)}")
        return cut[:_GIVEN], cut[_GIVEN : _GIVEN + _CONTINUED]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _filler(text: str | None) -> Filler:
    if text is None:
        return evaluate_text.generated
    sentences = evaluate_text.sentences(text)
    if len(sentences) < 2:
        raise UsageError("the text to hide facts in has fewer than two sentences; give a longer one")
    return lambda rng: evaluate_text.running(sentences, rng)
