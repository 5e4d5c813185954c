"""Reading graphs.json back, and comparing two of them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
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


def _no_stage(content: dict[str, Any]) -> None:
    del content["graphs"][0]["stages"]


def _no_such_node(content: dict[str, Any]) -> None:
    content["graphs"][0]["stages"][0]["nodes"][0] = 10**6


def _other_total(content: dict[str, Any]) -> None:
    content["totals"][0]["after"]["operators"] += 1


def _no_layer(content: dict[str, Any]) -> None:
    content["graphs"][0]["sites"][0]["layers"] = []


@pytest.mark.parametrize("damage", [_no_stage, _no_such_node, _other_total, _no_layer])
def test_a_damaged_document_is_refused_in_one_line(tmp_path: Path, content: dict[str, Any], damage: Any) -> None:
    broken = copy.deepcopy(content)
    damage(broken)
    path = _written(tmp_path, "graphs.json", broken)
    with pytest.raises(UsageError, match=r"is damaged \(.*\); dump that model again") as caught:
        graph_document.read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("\x00", "is no JSON"),
        ("[" * 10**5, "is no JSON"),
        ("[1]", "not of a kvcompile graph-dump"),
        ('{"kind": "kvcompile graph-dump", "schema": 99}', "has schema 99; this kvcompile reads 1"),
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
