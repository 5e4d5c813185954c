"""Reading graphs.json back, and comparing two of them."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.tools.graph_documents import document

from kvcompile import cli
from kvcompile.config import UsageError
from kvcompile.tools import graph_diff, graph_document


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    return document()


def _written(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_what_is_written_is_read_back(tmp_path: Path, content: dict[str, Any]) -> None:
    graph_document.write(tmp_path / "graphs.json", content)
    assert graph_document.read(tmp_path / "graphs.json") == content
    assert graph_document.read(tmp_path) == content, "a folder stands for the file in it"


def _set(*path: Any) -> Any:
    """Put the last of `path` where the ones before it lead."""

    def damage(content: dict[str, Any]) -> None:
        *way, last, value = path
        for key in way:
            content = content[key]
        content[last] = value

    return damage


def _without(*path: Any) -> Any:
    def damage(content: dict[str, Any]) -> None:
        for key in path[:-1]:
            content = content[key]
        del content[path[-1]]

    return damage


GRAPH = ("graphs", 0)
DAMAGES = {
    "no faults": (_without("faults"), "faults is missing"),
    "a number among the arguments": (_set("arguments", [1]), "arguments[0] is no text"),
    "a table among the faults": (_set("faults", [{}]), "faults[0] is no text"),
    "settings of another kind": (_set("settings", []), "settings is no table"),
    "options of another kind": (_set("settings", "kvcompile", 3), "settings.kvcompile is no table"),
    "no stages": (_without(*GRAPH, "stages"), "graphs[0].stages is missing"),
    "an empty list of stages": (_set(*GRAPH, "stages", []), "graphs[0] has no stages"),
    "no such node": (
        _set(*GRAPH, "stages", 0, "nodes", 0, 10**6),
        "graphs[0] has a stage with a node that is not there",
    ),
    "a negative node": (
        _set(*GRAPH, "stages", 0, "nodes", 0, -1),
        "graphs[0] has a stage with a node that is not there",
    ),
    "a site without operator": (_without(*GRAPH, "sites", 0, "operator"), "graphs[0].sites[0].operator is missing"),
    "a site without layers": (_set(*GRAPH, "sites", 0, "layers", []), "has not one layer per piece"),
    "a site left without reason": (_without(*GRAPH, "left", 0, "reason"), "graphs[0].left[0].reason is missing"),
    "a number that differs": (_set(*GRAPH, "left", 0, "differs", [1]), "graphs[0].left[0].differs[0] is no text"),
    "three bounds": (_set(*GRAPH, "tokens", [1, 2, 3]), "graphs[0].tokens is no least and most"),
    "one bound": (_set("totals", 0, "tokens", [1]), "totals[0].tokens is no least and most"),
    "a count that is true": (_set("totals", 0, "pieces", True), "totals[0].pieces is no number"),
    "a count beyond all": (_set("totals", 0, "pieces", 10**4000), "totals[0].pieces is no number"),
    "a name for a count": (
        _set(*GRAPH, "stages", 0, "histogram", "aten.exp", "one"),
        "graphs[0].stages[0].histogram.aten.exp is no number",
    ),
    "another total": (_set("totals", 0, "after", "operators", 1), "the totals are not those of its graphs"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_document_is_refused_in_one_line_with_exit_code_2(
    tmp_path: Path, content: dict[str, Any], capsys: pytest.CaptureFixture[str], damage: Any, said: str
) -> None:
    broken = copy.deepcopy(content)
    damage(broken)
    good, path = _written(tmp_path, "good.json", content), _written(tmp_path, "bad.json", broken)
    assert cli.main(["graph-dump", "--diff", str(good), str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvcompile: error: {path} is damaged (")
    assert err.endswith("); dump that model again\n")
    assert said in err
    assert err.count("\n") == 1


def test_every_key_that_a_document_has_may_be_gone_or_of_another_kind_without_a_traceback(
    tmp_path: Path, content: dict[str, Any]
) -> None:
    def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        parts = (
            value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else ()
        )
        for key, part in parts:
            yield (*way, key)
            yield from places(part, (*way, key))

    for place in places(content):
        for damage in (_without(*place), *(_set(*place, value) for value in (None, 3, "x", [], {}, [{}], {"x": 1}))):
            broken = copy.deepcopy(content)
            damage(broken)
            try:
                read = graph_document.read(_written(tmp_path, "graphs.json", broken))
            except UsageError:
                continue
            found = graph_diff.differences(content, read)
            graph_diff.show(Console(file=io.StringIO()), ("a", "b"), found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("\x00", "is no JSON"),
        ("[" * 10**5, "is no JSON"),
        ('{"kind": "\\ud800"}', "is no JSON"),
        ("[1]", "not of a kvcompile graph-dump"),
        ('{"kind": "kvcompile graph-dump", "schema": 99}', "has schema 99; this kvcompile reads 1"),
        ('{"kind": "kvcompile graph-dump", "schema": true}', "has schema true; this kvcompile reads 1"),
        ('{"kind": "kvcompile graph-dump", "schema": 1.0}', "has schema 1.0; this kvcompile reads 1"),
        (None, "No such file"),
    ],
)
def test_diff_refuses_what_is_no_dump_in_one_line_with_exit_code_2(
    tmp_path: Path, content: dict[str, Any], capsys: pytest.CaptureFixture[str], text: str | None, said: str
) -> None:
    good, bad = _written(tmp_path, "good.json", content), tmp_path / "bad.json"
    if text is not None:
        bad.write_text(text)
    assert cli.main(["graph-dump", "--diff", str(good), str(bad)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvcompile: error: {bad}")
    assert said in err
    assert err.count("\n") == 1


def test_a_name_that_is_too_long_is_one_line(tmp_path: Path, content: dict[str, Any], capsys: Any) -> None:
    good, long = _written(tmp_path, "good.json", content), tmp_path / ("x" * 300)
    assert cli.main(["graph-dump", "--diff", str(good), str(long)]) == 2
    assert capsys.readouterr() == (
        "",
        f"kvcompile: error: {long}: File name too long; give the graphs.json of a kvcompile graph-dump\n",
    )


def test_equal_dumps_are_exit_code_0(tmp_path: Path, content: dict[str, Any], capsys: Any) -> None:
    path = _written(tmp_path, "a.json", content)
    assert cli.main(["graph-dump", "--diff", str(path), str(path)]) == 0
    assert "Equal" in capsys.readouterr().out


def test_different_dumps_are_exit_code_1_and_say_what_differs(
    tmp_path: Path, content: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    other = {**content, "versions": {**content["versions"], "vllm": "0.24.0"}}
    a, b = _written(tmp_path, "a.json", content), _written(tmp_path, "b.json", other)
    assert cli.main(["graph-dump", "--diff", str(a), str(b)]) == 1
    out = capsys.readouterr().out
    assert "Versions" in out
    assert "0.24.0" in out


def test_a_difference_names_its_part_and_both_values(content: dict[str, Any]) -> None:
    other = copy.deepcopy(content)
    other["arguments"] = []
    other["settings"]["kvcompile"]["passes"]["norm_quant"] = False
    graph = other["graphs"][0]
    site = graph["sites"].pop()
    graph["stages"][-1] = graph["stages"][0]
    graph["passes"][1]["matched"] = 0
    other["totals"] = graph_document.totals(other["graphs"])
    found = graph_diff.differences(content, other)
    by = {(difference.part, difference.what): (difference.a, difference.b) for difference in found}
    assert by["Flags and settings", "flags"] == ("--max-model-len 256", "none")
    assert by["Flags and settings", "kvcompile.passes.norm_quant"] == ("true", "false")
    where = f"swiglu_quant: kvcompile.silu_mul_quant at {site['layers'][0]}"
    assert by["Sites", f"1 to 256 tokens, {where}"] == (1, None)
    assert by["Operators by name", "1 to 256 tokens, after: aten.exp"] == (None, 1)
    assert (
        by["Operators and bytes", "1 to 256 tokens, after: bytes per token"][0]
        < (by["Operators and bytes", "1 to 256 tokens, after: bytes per token"][1])
    )


def test_names_of_nodes_are_no_difference(content: dict[str, Any]) -> None:
    renamed = json.loads(json.dumps(content).replace("quant_per_token_1", "quant_per_token_7"))
    assert renamed != content
    assert graph_diff.differences(content, renamed) == []


MARKUP = "/models/llama[/v2][red]:fire:\\"


def test_names_that_look_like_markup_are_shown_as_they_are(content: dict[str, Any]) -> None:
    other = json.loads(json.dumps(content).replace("silu_mul_quant", f"x{json.dumps(MARKUP)[1:-1]}"))
    other |= {"model": MARKUP, "arguments": [MARKUP], "versions": {MARKUP: MARKUP}, "faults": [MARKUP]}
    other["settings"]["kvcompile"] = {MARKUP: {MARKUP: MARKUP}}
    found = graph_diff.differences(content, other)
    out = io.StringIO()
    graph_diff.show(Console(file=out, width=900), (MARKUP, MARKUP), found)
    shown = out.getvalue()
    assert f"A: {MARKUP}\nB: {MARKUP}\n" in shown
    named = [text for _, *texts in found for text in texts if isinstance(text, str) and MARKUP in text]
    assert len(named) == 9
    assert [text for text in named if text not in shown] == []


def test_a_document_with_half_a_character_is_written_whole_and_refused_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "graphs.json"
    graph_document.write(path, document(model="\ud800"))
    assert json.loads(path.read_text())["model"] == "\ud800"
    with pytest.raises(UsageError, match="surrogates not allowed"):
        graph_document.read(path)
