"""What README.md, CONTRIBUTING.md and docs/ name is there: files, commands, options, and the code's own names."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from kvcompile import cli
from kvcompile.config import OPTIONS
from kvcompile.config_sources import ALIASES, RESERVED, environment_name

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
SUFFIXES = (".py", ".cu", ".cuh", ".sh", ".md", ".json", ".txt", ".toml", ".env", ".in", ".html", ".yaml")
# Of a checkpoint, or what a command writes.
NOT_OURS = {"config.json", "report.html", "graphs.json"}
SOURCES = ("kvcompile", "ops", "passes", "integrations", "tools", "tests", "scripts")


def _blocks(document: Path) -> list[str]:
    """The lines of indented code."""
    return [line.strip() for line, code in _lines(document) if code]


def _spans(document: Path) -> list[str]:
    """What stands between backticks, also across the end of a line."""
    prose = [line.strip() or "\n" for line, code in _lines(document) if not code]
    paragraphs = " ".join(prose).split("\n")
    return [span for paragraph in paragraphs for span in re.findall(r"`([^`]+)`", paragraph)]


def _lines(document: Path) -> list[tuple[str, bool]]:
    """Each line, and whether it is indented code, which begins behind an empty line."""
    found: list[tuple[str, bool]] = []
    may_begin = True
    for line in document.read_text().splitlines():
        code = may_begin and line.startswith("    ")
        found.append((line, code))
        may_begin = code or not line
    return found


def _commands(lines: list[str], word: str) -> list[list[str]]:
    """The arguments of each command `word` there, optional ones included; comments and placeholders left out."""
    found = []
    for line in lines:
        line = re.sub(r"\[([^]-][^]]*)\]", "", line)  # [words that stand for anything]
        line = line.replace("[", "").replace("]", "")
        if re.match(rf"{word} [a-z-]+( |$)", line):
            found.append(shlex.split(line, comments=True)[1:])
    return found


@cache
def _names_of_sources() -> frozenset[str]:
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*")]
    texts = [path.read_text() for path in files if path.suffix in (".py", ".cu", ".cuh", ".sh")]
    return frozenset(word for text in texts for word in re.findall(r"\w+", text))


@cache
def _file_names() -> frozenset[str]:
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return frozenset(path.name for folder in folders for path in (*ROOT.iterdir(), *folder.rglob("*")))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_that_is_named_exists(document: Path) -> None:
    missing = []
    for span in _spans(document):
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", span):
            continue
        if "/" in span:
            inside = document in DOCS or (ROOT / span.split("/")[0]).exists()
            missing += [span] if inside and not (ROOT / span).exists() else []
        elif span.endswith(SUFFIXES) and span not in {*SUFFIXES, *NOT_OURS, *_file_names()}:
            missing.append(span)
    links = re.findall(r"\]\(([^)#:]+)\)", document.read_text())
    missing += [link for link in links if not (document.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_is_one_that_the_parser_takes(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = []
    mentioned = _commands(_spans(document), "kvcompile")
    for arguments in [*_commands(_blocks(document), "kvcompile"), *mentioned]:
        try:
            cli._parser(arguments[0]).parse_args(arguments)
        except SystemExit:
            said = capsys.readouterr().err
            # In a sentence a command may stand for itself, without what it cannot do without.
            if arguments not in mentioned or "arguments are required" not in said:
                refused.append(said)
    assert not refused


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_target_of_make_is_one(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {arguments[0] for arguments in _commands([*_blocks(document), *_spans(document)], "make")}
    assert named <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_option_and_variable_is_one_and_may_have_the_value_that_is_shown(document: Path) -> None:
    text = document.read_text()
    for key, value in re.findall(r"-cc\.kvcompile\.([a-z_.0-9]+)=(\w+)", text):
        assert key in OPTIONS
        OPTIONS[key].from_text(value)  # raises UsageError
    known = {*map(environment_name, OPTIONS), *ALIASES, *RESERVED}
    assert set(re.findall(r"\b(?:KVCOMPILE|VLLM_ANDPRO)_[A-Z0-9_]*[A-Z0-9]\b", text)) <= known


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_every_name_of_code_is_in_the_sources(document: Path) -> None:
    named = {span.partition("(")[0] for span in _spans(document)}
    names = {name.rpartition(".")[2] for name in named if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name)}
    assert len(names) > 5
    assert sorted(names - _names_of_sources()) == []
