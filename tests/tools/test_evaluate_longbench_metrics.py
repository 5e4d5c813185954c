"""LongBench's metrics: values that the published code gives for the same texts."""

from __future__ import annotations

import pytest

from kvcompile.tools import evaluate_longbench_metrics as metrics
from kvcompile.tools.evaluate_longbench_metrics import METRICS, NO_METRIC, score

CLASSES = ["Food", "drink", "Food and drink", "Date", "Other date", "date"]


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("The cat, a dog!", "cat dog", 1),
        ("cat cat dog", "the cat", 0.5),
        ("An answer", "other", 0),
        ("", "cat", 0),
        ("the", "a", 0),
        ("St. John's-wood", "st johnswood", 1),
    ],
)
def test_qa_f1_is_of_bags_of_words_without_case_punctuation_and_articles(answer, reference, expected) -> None:
    assert metrics.qa_f1(answer, reference) == expected


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("the cat sat", "the cat sat", 0.999999995),
        ("a b c. d e", "b d. e c", 0.8888888839506174),
        ("a a a b", "a b", 0.999999995),
        ("b a", "a b", 0.499999995),
        ("x", "y", 0),
        ("...", "y", 0),
        ("a. b", "a.b", 0.999999995),
        ("a. .b", "a", 0.4999999962500001),
        ("", "a", 0),
    ],
)
def test_rouge_l_is_of_sets_of_words_in_common_subsequences_of_sentences(answer, reference, expected) -> None:
    assert metrics.rouge_l(answer, reference) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("Date", "Date", 1),
        ("It is Food and drink", "Food and drink", 0.5),  # "Food" is taken out, and "drink" after it not looked at
        ("It is Food and drink", "Food", 1 / 3),
        ("date Date", "Date", 0.5),
        ("neither", "Date", 0),
    ],
)
def test_a_class_counts_one_over_those_that_are_named(answer: str, reference: str, expected: float) -> None:
    assert metrics.classification(answer, reference, CLASSES) == expected


def test_numbers_count_by_the_share_of_right_ones() -> None:
    assert metrics.counting("7, then 12 and 7", "7") == pytest.approx(2 / 3)
    assert metrics.counting("none", "7") == 0
    assert metrics.retrieval("Paragraph 7 or 17", "Paragraph 7") == 0.5
    assert metrics.retrieval_zh("段落7", "段落7") == 1


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("\n\nreturn x\nmore", "return x", 1),
        ("```python\n# note\nreturn y", "return x", 0.88),
        ("// only\n`that`", "x", 0),
        ("", "", 1),
    ],
)
def test_code_is_compared_by_its_first_line_that_is_no_comment(answer: str, reference: str, expected: float) -> None:
    assert metrics.code_similarity(answer, reference) == expected


def test_the_best_reference_counts_and_of_some_tasks_the_first_line_alone() -> None:
    assert score("hotpotqa", "red\nblue", ["green", "red blue"], []) == 1
    assert score("triviaqa", "\nred\nblue", ["red", "blue"], []) == 1
    assert score("triviaqa", "red\nblue", ["blue"], []) == 0
    assert score("trec", "Date\nFood", ["Date"], CLASSES) == 1


def test_every_published_task_has_a_metric_or_is_named_as_having_none() -> None:
    assert len(METRICS) == 18 and len(NO_METRIC) == 3 and not set(METRICS) & set(NO_METRIC)
