"""`kvcompile evaluate retrieval` and `perplexity`: records, tables and drawings, and what is wrong said in one line."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from tests.tools import quantize_sources as sources

from kvcompile import cli
from kvcompile.tools import evaluate_run
from kvcompile.tools.evaluate_pruned import Outcome
from kvcompile.tools.evaluate_statistics import compared, interval, macro_row, row
from kvcompile.tools.prose import prose

SVG = "{http://www.w3.org/2000/svg}"
METHODS = ("streaming", "robust:anchor=0.5,last=0.2")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sources.write(tmp_path_factory.mktemp("evaluate") / "model")


def _evaluate(checkpoint: Path, *options: str) -> int:
    methods = [word for method in METHODS for word in ("--method", method)]
    common = ["--plain", "--task", "single", "--length", "500", "--budget", "20%", "--budget", "100"]
    return cli.main(["evaluate", "retrieval", str(checkpoint), *common, *methods, "--against", "streaming", *options])


def test_a_record_holds_means_with_intervals_and_paired_differences(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / f"quality.{name}" for name in ("json", "markdown", "plot")}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert _evaluate(checkpoint, "--position", "last", "--position", "later", "--samples", "3", *options) == 0
    record = json.loads(files["json"].read_text())
    assert record["name"] == "quality" and "transformers" in record["versions"]
    rows = {(row["case"], row["system"], row["metric"]): row for row in record["rows"]}
    systems = ("full", *METHODS)
    for case in ("last, 20 %", "last, 100 tokens", "later, 20 %, single"):
        for system in systems:
            rank1, nll = rows[case, system, "rank1"], rows[case, system, "nll"]
            assert 0 <= rank1["mean_low"] <= rank1["mean"] <= rank1["mean_high"] <= 1 and rank1["runs"] == 3
            assert 0 < nll["min"] <= nll["mean"] <= nll["max"]
        assert (case, "streaming", "difference") not in rows
        ours, base = (rows[case, system, "rank1"]["mean"] for system in (METHODS[1], "streaming"))
        assert abs(rows[case, METHODS[1], "difference"]["mean"] - (ours - base)) < 2e-4
    printed, markdown = capsys.readouterr().out, files["markdown"].read_text()
    for system in systems:
        assert system in printed and f"| {system} | " in markdown
    svg = ElementTree.fromstring(files["plot"].read_text())
    assert len(list(svg.iter(f"{SVG}circle"))) == 4 * len(systems)
    assert "evaluate retrieval" in record["command"] or record["command"].startswith("kvcompile")


@pytest.mark.slow
def test_several_processes_find_what_one_finds(checkpoint: Path, tmp_path: Path) -> None:
    found = []
    for processes in ("1", "2"):
        path = tmp_path / f"{processes}.json"
        assert _evaluate(checkpoint, "--position", "first", "--processes", processes, "--json", str(path)) == 0
        found.append(json.loads(path.read_text())["rows"])
    for one, two in zip(*found, strict=True):
        for name in ("case", "system", "metric", "runs"):
            assert one[name] == two[name]
        assert abs(one["mean"] - two["mean"]) < 1e-3 and abs(one["min"] - two["min"]) < 1e-3


def test_seconds_end_the_rounds_but_not_the_first(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _evaluate(checkpoint, "--position", "last", "--seconds", "0", "--samples", "9") == 0
    assert "stopped after 1 of 9 rounds" in capsys.readouterr().err


@pytest.mark.parametrize(("methods", "against"), [(("tova", "andpro"), "andpro"), (("tova",), "full")])
def test_differences_are_from_a_system_that_was_measured(
    methods: tuple[str, ...],
    against: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    systems = ("full", *methods)
    found = {("last, 50 %", system): [Outcome(1.0, 0.5)] for system in systems}
    monkeypatch.setattr(evaluate_run, "measure", lambda plan, processes: found)
    asked = [word for method in methods for word in ("--method", method)]
    target = tmp_path / "quality.json"
    assert cli.main(["evaluate", "retrieval", str(tmp_path), *asked, "--json", str(target)]) == 0
    rows = json.loads(target.read_text())["rows"]
    compared = {row["system"] for row in rows if row["metric"] == "difference"}
    assert compared == set(systems) - {against}
    assert f"paired difference from {against}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--method", "h2o"], "--method h2o: pruning method: given 'h2o', allowed andpro, "),
        (["--method", "tova:window"], "--method tova:window: given 'window', allowed PARAMETER=VALUE"),
        (["--method", "tova:window=x"], "--method tova:window=x: given 'x', allowed a number"),
        (["--against", "nothing"], "--against nothing: allowed are streaming, "),
        (["--samples", "0"], "--samples 0; allowed is 1 or more"),
        (["--budget", "x"], "--budget: given 'x', allowed a share such as 25%"),
        (["--device", "nowhere"], "--device nowhere: "),
        (["--device", "meta"], "--device meta: "),
        (["--text", "/nowhere"], "--text /nowhere cannot be read as UTF-8 text"),
        (["--length", "1024"], "--length 1024: "),
        (["--length", "100000000"], "--length 100000000: the model has positions for "),
        (["--seconds", "-1"], "--seconds -1.0; allowed is 0 or more"),
        (["--json", "/"], "--json /: a folder; give the name of a file"),
        (["--length", "36"], "--length 36: nothing can be pruned; allowed is 37 or more"),
        (["--json", "/nowhere/x.json"], "--json /nowhere/x.json: the folder does not exist"),
    ],
)
def test_what_is_wrong_is_one_line(
    checkpoint: Path, options: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _evaluate(checkpoint, *options) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"kvcompile: error: {line}")


def test_no_evaluation_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate"]) == 2
    assert capsys.readouterr().err.startswith(
        "kvcompile: error: no evaluation is given; allowed are retrieval, perplexity"
    )


def test_perplexity_is_that_of_the_losses(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kvcompile.tools.quantize_perplexity import losses, tokens_of
    from kvcompile.tools.quantize_source import Source

    text = tmp_path / "text.txt"
    text.write_text(prose()[:1600], encoding="utf-8")
    target = tmp_path / "perplexity.json"
    markdown = tmp_path / "perplexity.md"
    options = ["--json", str(target), "--markdown", str(markdown)]
    assert cli.main(["evaluate", "perplexity", str(checkpoint), str(text), *options]) == 0
    nll, perplexity = json.loads(target.read_text())["rows"]
    source = Source(checkpoint)
    with torch.inference_mode():
        expected = losses(checkpoint, source, tokens_of(text, checkpoint, "TEXT", 256), lambda layers: None).double()
    assert nll["runs"] == 3 and abs(nll["mean"] - expected.mean().item()) < 1e-4
    assert abs(perplexity["mean"] - expected.mean().exp().item()) / perplexity["mean"] < 1e-3
    assert perplexity["mean_low"] <= perplexity["mean"] <= perplexity["mean_high"]
    assert "text.txt" in capsys.readouterr().out and "as stored" in markdown.read_text()


def test_a_folder_that_is_no_checkpoint_has_no_perplexity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(prose(), encoding="utf-8")
    for given, line in ((str(tmp_path), "no folder with a config.json"), (str(tmp_path / "no"), "no folder with a ")):
        assert cli.main(["evaluate", "perplexity", given, str(text)]) == 2
        assert capsys.readouterr().err.startswith(f"kvcompile: error: {given}: {line}")
    assert cli.main(["evaluate", "perplexity", str(tmp_path), str(text), "--limit", "100"]) == 2
    assert "--limit 100; allowed is 512 or more" in capsys.readouterr().err


def test_an_interval_holds_the_mean_of_most_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(200):
        low, high = interval(torch.randn(40, generator=generator).tolist())
        held += low <= 0 <= high
    assert 175 <= held <= 200
    assert interval([0.5, 0.5]) == (0.5, 0.5)


def test_a_row_keeps_the_record_s_shape() -> None:
    made = row("last, 50 %", "andpro", "rank1", "share", [0.0, 1.0, 1.0])
    assert made["median"] == 1 and made["runs"] == 3 and made["mean"] == 0.6667
    assert made["mean_low"] <= made["mean"] <= made["mean_high"]


def test_of_groups_each_counts_the_same_and_is_drawn_from_by_itself() -> None:
    made = macro_row("all", "a", "score", "share", [[1.0] * 9, [0.0]])
    assert (made["mean"], made["mean_low"], made["mean_high"]) == (0.5, 0.5, 0.5) and made["runs"] == 10
    wide = macro_row("all", "a", "score", "share", [[1.0, 0.0] * 20, [0.0]])
    assert 0.1 < wide["mean_low"] < wide["mean"] == 0.25 < wide["mean_high"] < 0.4


def test_differences_are_of_the_same_samples() -> None:
    values = {("last", "a"): [1.0, 0.0, 0.5], ("last", "b"): [0.5, 0.5, 0.5]}
    rows = compared(values, "contained", "share", "a")
    assert [(each["system"], each["metric"]) for each in rows] == [
        ("a", "contained"),
        ("b", "contained"),
        ("b", "difference"),
    ]
    assert rows[2]["mean"] == 0 and (rows[2]["min"], rows[2]["max"]) == (-0.5, 0.5)
