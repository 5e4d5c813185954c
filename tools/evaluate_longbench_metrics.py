"""The metrics of LongBench by task, equal to the published ones, in code of our own. A score is from 0 to 1.

Y. Bai et al.: LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding, ACL 2024. The published code
takes ROUGE-L from the package `rouge` 1.0.1 and the code similarity from `fuzzywuzzy` 0.18, which are followed to the
digit where they return a score; where a text is so long that `rouge` fails on Python's limit of recursion, the
published score is 0 and ours is not. Tasks whose metric cuts Chinese text into words by `jieba` are not offered.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

import numpy as np

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_COMMENT_MARKS = ("`", "#", "//")
_SMALL = 1e-8  # keeps ROUGE's harmonic mean of zeros from dividing by zero

Metric = Callable[[str, str, Sequence[str]], float]  # of an answer, a reference and the task's classes


def qa_f1(answer: str, reference: str, _classes: Sequence[str] = ()) -> float:
    """F1 of the bags of words, without case, punctuation and articles."""
    said, wanted = _words(answer), _words(reference)
    common = (Counter(said) & Counter(wanted)).total()
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def rouge_l(answer: str, reference: str, _classes: Sequence[str] = ()) -> float:
    """F of ROUGE-L at summary level, sentences ending at full stops, by sets of words.

    U: words of any longest common subsequence of a sentence of each; P = |U| / |answer's|, R = |U| / |reference's|.
    """
    said, wanted = _sentences(answer), _sentences(reference)
    if not said or not wanted:
        return 0.0
    union = {word for ours in wanted for theirs in said for word in _common_subsequence(ours, theirs)}
    precision = len(union) / len({word for sentence in said for word in sentence})
    recall = len(union) / len({word for sentence in wanted for word in sentence})
    return 2 * precision * recall / (precision + recall + _SMALL)


def classification(answer: str, reference: str, classes: Sequence[str]) -> float:
    """1 / n if the right class is one of the n that the answer names; parts of the right class's name do not count.

    As published, a name that follows one which was taken out is not looked at.
    """
    named = [name for name in classes if name in answer]
    at = 0
    while at < len(named):
        if named[at] in reference and named[at] != reference:
            named.remove(named[at])
        at += 1
    return 1 / len(named) if reference in named else 0.0


def counting(answer: str, reference: str, _classes: Sequence[str] = ()) -> float:
    """The share of right ones among the numbers of the answer."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval(answer: str, reference: str, _classes: Sequence[str] = ()) -> float:
    """The share of the number in "Paragraph 7" among the numbers of the answer."""
    return counting(answer, _numbered("Paragraph ", reference))


def retrieval_zh(answer: str, reference: str, _classes: Sequence[str] = ()) -> float:
    """As `retrieval`, of references in Chinese."""
    return counting(answer, _numbered("段落", reference))


def code_similarity(answer: str, reference: str, _classes: Sequence[str] = ()) -> float:
    """Similarity in whole hundredths of the answer's first line that is no comment; an empty one has none."""
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in _COMMENT_MARKS)), "")
    if line == reference:
        return 1.0
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100 if line and reference else 0.0


METRICS: dict[str, Metric] = {
    "narrativeqa": qa_f1,
    "qasper": qa_f1,
    "multifieldqa_en": qa_f1,
    "hotpotqa": qa_f1,
    "2wikimqa": qa_f1,
    "musique": qa_f1,
    "gov_report": rouge_l,
    "qmsum": rouge_l,
    "multi_news": rouge_l,
    "trec": classification,
    "triviaqa": qa_f1,
    "samsum": rouge_l,
    "lsht": classification,
    "passage_count": counting,
    "passage_retrieval_en": retrieval,
    "passage_retrieval_zh": retrieval_zh,
    "lcc": code_similarity,
    "repobench-p": code_similarity,
}
NO_METRIC = ("multifieldqa_zh", "dureader", "vcsum")  # their published metrics need the words of Chinese text
_FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")  # of whose answers the first line alone counts


def score(task: str, answer: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """The best of an answer's scores over the references."""
    if task in _FIRST_LINE:
        answer = answer.lstrip("\n").split("\n")[0]
    return max((METRICS[task](answer, reference, classes) for reference in references), default=0.0)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _sentences(text: str) -> list[list[str]]:
    """Words of each; one of white space alone has the empty word."""
    return [sentence.split() or [""] for sentence in text.split(".") if sentence]


def _common_subsequence(ours: Sequence[str], theirs: Sequence[str]) -> list[str]:
    """The words of a longest common subsequence, last first; of several, that which drops words of `theirs` first."""
    numbers = {word: number for number, word in enumerate({*ours, *theirs})}
    row = np.array([numbers[word] for word in theirs])
    lengths = np.zeros((len(ours) + 1, len(theirs) + 1), dtype=np.int32)
    for i, word in enumerate(ours):
        longer = np.where(row == numbers[word], lengths[i, :-1] + 1, lengths[i, 1:])
        lengths[i + 1, 1:] = np.maximum.accumulate(longer)
    i, j, found = len(ours), len(theirs), []
    while i and j:
        if ours[i - 1] == theirs[j - 1]:
            found.append(ours[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1, j] > lengths[i, j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def _numbered(word: str, reference: str) -> str:
    found = re.search(rf"{word}(\d+)", reference)
    return found[1] if found else ""
