"""Generated samples: as long as asked, the same for a seed, answerable from what stands where they say it does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvcompile.config import UsageError
from kvcompile.tools.evaluate_samples import POSITIONS, Generator, Sample
from kvcompile.tools.evaluate_tasks import TASKS
from kvcompile.tools.prose import prose


@pytest.fixture(scope="module")
def tokenizer(smollm2_checkpoint: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_checkpoint)


@pytest.fixture(scope="module", params=["generated", "prose"])
def generator(tokenizer: Any, request: pytest.FixtureRequest) -> Generator:
    return Generator(tokenizer, prose() if request.param == "prose" else None)


def _facts(tokenizer: Any, sample: Sample) -> list[str]:
    return [tokenizer.decode(sample.prompt[at : at + count]).strip() for at, count in sample.facts]


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("task", TASKS)
def test_prompts_have_exactly_the_tokens_asked_for(generator: Generator, task: str, position: str) -> None:
    for length in (512, 513, 1024):
        sample = generator.sample(task, position, length, 7)
        assert len(sample.prompt) == length and sample.later and sample.answer


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_is_a_function_of_its_seed(generator: Generator, task: str) -> None:
    first, again, other = (generator.sample(task, "last", 512, seed) for seed in (3, 3, 4))
    assert first == again
    assert first.prompt != other.prompt and first.answer != other.answer


@pytest.mark.parametrize("task", [task for task in TASKS if task != "continuation"])
def test_all_positions_ask_the_same_of_the_same_facts(generator: Generator, tokenizer: Any, task: str) -> None:
    samples = [generator.sample(task, position, 700, 5) for position in POSITIONS]
    assert len({tuple(sample.answer) for sample in samples}) == 1
    assert len({tuple(_facts(tokenizer, sample)) for sample in samples}) == 1


@pytest.mark.parametrize("task", ["single", "multi-key", "multi-value", "multi-query"])
def test_every_number_of_an_answer_stands_in_a_fact_of_an_asked_key(
    generator: Generator, tokenizer: Any, task: str
) -> None:
    for seed in range(5):
        sample = generator.sample(task, "later", 600, seed)
        facts = [re.fullmatch(r"One of .* for (\S+) is (\d{7})\.", fact) for fact in _facts(tokenizer, sample)]
        asked = re.search(r"magic numbers? for (.*) mentioned", tokenizer.decode(sample.later))[1]
        keys = re.split(r", | and ", asked)
        wanted = [fact[2] for key in keys for fact in facts if fact[1] == key]
        assert re.findall(r"\d{7}", tokenizer.decode(sample.answer)) == wanted and wanted


def test_variables_are_those_that_the_value_reaches(generator: Generator, tokenizer: Any) -> None:
    for seed in range(5):
        sample = generator.sample("variables", "last", 600, seed)
        value = re.search(r"value (\d{5})", tokenizer.decode(sample.later))[1]
        reached: list[str] = []
        for fact in _facts(tokenizer, sample):
            name, source = re.fullmatch(r"The variable (\w+) is set to (?:the value of )?(\w+)\.", fact).groups()
            if source == value or source in reached:
                reached.append(name)
        assert re.findall(r"[A-Z]{3,}", tokenizer.decode(sample.answer)) == reached and len(reached) == 3


@pytest.mark.parametrize("task", ["common-words", "frequent-words"])
def test_counted_words_are_the_three_that_come_most_often(generator: Generator, tokenizer: Any, task: str) -> None:
    for seed in range(3):
        sample = generator.sample(task, "later", 1024, seed)
        text = tokenizer.decode(sample.prompt).split("carefully.")[1].split("<|im_end|>")[0].split()
        counts = sorted(((text.count(word), word) for word in set(text)), reverse=True)
        assert counts[2][0] > 3 * counts[3][0]
        top = [word for _, word in counts[:3]]
        wanted = sorted(top) if task == "common-words" else top
        assert re.findall(r"[a-z]{3,}", tokenizer.decode(sample.answer).replace(" and ", " ")) == wanted


def test_a_copied_sentence_follows_the_quoted_one(generator: Generator, tokenizer: Any) -> None:
    for seed in range(5):
        sample = generator.sample("copying", "later", 600, seed)
        quoted = re.search(r'directly after "(.*)" in the text above', tokenizer.decode(sample.later))[1]
        assert f"{quoted} {tokenizer.decode(sample.answer).strip()}" in _facts(tokenizer, sample)[0]


def test_a_left_out_word_is_that_of_the_sentence_in_the_text(generator: Generator, tokenizer: Any) -> None:
    for seed in range(5):
        sample = generator.sample("cloze", "later", 600, seed)
        gap = re.search(r'sentence of the text above: "(.*)"\?', tokenizer.decode(sample.later))[1]
        (word,) = sample.wanted
        assert tokenizer.decode(sample.answer).strip() == word and gap.count("____") == 1
        assert gap.replace("____", word) == _facts(tokenizer, sample)[0]


def test_a_continuation_is_how_the_text_goes_on(tokenizer: Any) -> None:
    text = " ".join(prose().split())
    for position in POSITIONS:
        sample = Generator(tokenizer, prose()).sample("continuation", position, 700, 2)
        context = tokenizer.decode(sample.prompt)
        for end in ("<|im_end|>\n<|im_start|>assistant\n", "\n\nContinue the text above."):
            context = context.removesuffix(end)
        reply = sample.later[-8:] + sample.answer
        assert len(sample.answer) == 64 and context[-300:] + tokenizer.decode(reply) in text


def test_the_question_stands_where_it_is_asked_for(generator: Generator, tokenizer: Any) -> None:
    last, first, later = (generator.sample("single", position, 512, 1) for position in POSITIONS)
    question = "What is the special magic number"
    assert question in tokenizer.decode(last.prompt[-40:]) and question not in tokenizer.decode(last.later)
    assert question in tokenizer.decode(first.prompt[:60]) and question not in tokenizer.decode(first.prompt[60:])
    assert question not in tokenizer.decode(later.prompt) and question in tokenizer.decode(later.later)


@pytest.mark.parametrize("task", [task for task in TASKS if task != "continuation"])
def test_the_texts_that_a_served_reply_must_have_are_those_of_the_answer(
    generator: Generator, tokenizer: Any, task: str
) -> None:
    last, later = (generator.sample(task, position, 700, 5) for position in ("last", "later"))
    answer = tokenizer.decode(last.answer)
    assert last.wanted == later.wanted and last.wanted and all(text in answer for text in last.wanted)
    assert last.asked == last.prompt
    end = later.asked[len(later.prompt) :]
    assert end and end == later.later[: later.turn] and later.later[later.turn :] == last.later


def test_facts_are_spread_over_the_context(generator: Generator) -> None:
    depths = [generator.sample("single", "last", 1024, seed).facts[0][0] for seed in range(40)]
    assert min(depths) < 256 and max(depths) > 768


def test_a_prompt_without_room_is_one_line(generator: Generator) -> None:
    with pytest.raises(UsageError, match=r"^multi-key: a prompt of 100 tokens has no room for 8 facts; it is \d+ "):
        generator.sample("multi-key", "last", 100, 0)


def test_a_tokenizer_without_a_chat_template_gives_plain_prompts_alone(tokenizer: Any) -> None:
    class Bare:
        chat_template = None
        bos_token_id = 1

        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [1] * add_special_tokens + list(text.encode())}

    with pytest.raises(UsageError, match="^the tokenizer has no chat template; give --plain"):
        Generator(Bare())
    sample = Generator(Bare(), chat=False).sample("single", "last", 900, 0)
    assert sample.prompt[0] == 1 and 1 not in sample.prompt[1:]
    assert bytes(sample.prompt).decode().endswith("mentioned in the text above?\n\nAnswer:")
    assert re.fullmatch(r"\d{7}", bytes(sample.answer).decode())


def test_a_text_of_short_sentences_is_copied_too(tokenizer: Any) -> None:
    assert len(Generator(tokenizer, "One. Two. Three.").sample("copying", "last", 300, 0).prompt) == 300


def test_a_text_of_one_sentence_hides_nothing(tokenizer: Any) -> None:
    with pytest.raises(UsageError, match="fewer than two sentences"):
        Generator(tokenizer, "Only this.")
