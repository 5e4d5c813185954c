"""What `kvcompile bench serve` reads its options from, writes its results to, and takes up again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console
from tests.tools.fake_served import Fake, install

from kvcompile.cli import main
from kvcompile.passes import pipeline
from kvcompile.tools import model_shapes, record, serve_plot

GIVEN = ["bench", "serve", "llama-3.2-1b", "--grid", "8:5,16:3", "--requests", "4", "--runs", "2"]
SYSTEMS = ["--systems", "vllm-bf16,kvcompile/kv8"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    return install(monkeypatch)


def timed() -> list[tuple[str, Any]]:
    return [(name, what) for name, what in Fake.asked if not isinstance(what, str) and what[3] < 1000]


def test_a_run_that_was_cut_short_goes_on_where_it_ended(
    fake: type[Fake], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*GIVEN, *SYSTEMS, "--json", str(tmp_path / "x.json")]
    state = tmp_path / "x.json.state"
    fake.fails = "kvcompile/kv8"
    assert main(command) == 2
    assert len(timed()) == 4 and state.exists()
    with state.open("a") as file:
        file.write('{"run": {"seco')  # as a killed process leaves it
    install_again(fake)
    assert main(command) == 0
    assert {name for name, _ in fake.asked} == {"kvcompile/kv8"} and len(timed()) == 4
    assert f"{state} has 4 runs of this command; going on from them" in capsys.readouterr().err
    written = json.loads((tmp_path / "x.json").read_text())
    assert written["taken_up_runs"] == 4 and {row["system"] for row in written["rows"]} == set(SYSTEMS[1].split(","))
    assert not state.exists()


def test_a_broken_line_is_gone_when_the_next_is_written(fake: type[Fake], tmp_path: Path) -> None:
    command = [*GIVEN, *SYSTEMS, "--json", str(tmp_path / "x.json")]
    fake.fails = "kvcompile/kv8"
    for _ in range(3):
        assert main(command) == 2
        with (tmp_path / "x.json.state").open("a") as file:
            file.write('{"run"')
    install_again(fake)
    assert main(command) == 0


def install_again(fake: type[Fake]) -> None:
    fake.asked, fake.fails = [], ""


@pytest.mark.parametrize(
    ("changed", "key"),
    [(["--runs", "3"], "runs"), (["--grid", "8:5"], "grid"), (["--kv-gib", "9"], "total-gib, kv-gib")],
)
def test_another_command_does_not_take_up_what_one_has_left(
    fake: type[Fake], tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: list[str], key: str
) -> None:
    command = [*GIVEN, *SYSTEMS, "--json", str(tmp_path / "x.json")]
    fake.fails = "kvcompile/kv8"
    assert main(command) == 2
    install_again(fake)
    capsys.readouterr()
    assert main([*command, *changed]) == 2
    said = capsys.readouterr().err
    assert f"holds runs that were made with another {key}; repeat that command" in said and said.count("\n") == 1
    assert not fake.asked


def test_other_versions_do_not_take_up_what_one_has_left(
    fake: type[Fake], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [*GIVEN, *SYSTEMS, "--json", str(tmp_path / "x.json")]
    fake.fails = "kvcompile/kv8"
    assert main(command) == 2
    monkeypatch.setattr(record, "versions", lambda: {"vllm": "0.24.0"})
    monkeypatch.setattr(pipeline, "source_hash", lambda *_: "of other files")
    assert main(command) == 2
    assert "made with another package, kvcompile; repeat" in capsys.readouterr().err


def test_the_code_that_measures_the_models_shape_and_the_environment_have_to_be_the_same(
    fake: type[Fake], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: set[str] = set()
    monkeypatch.setattr(pipeline, "source_hash", lambda *all_of: hashed.update(p.__name__ for p in all_of) or "x")
    shape, model = model_shapes.SHAPES["llama-3.2-1b"], tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(shape))
    command = ["bench", "serve", str(model), *GIVEN[3:], *SYSTEMS, "--json", str(tmp_path / "x.json")]
    fake.fails = "kvcompile/kv8"
    assert main(command) == 2
    assert hashed == {"kvcompile", *(f"kvcompile.{name}" for name in ("ops", "passes", "integrations", "tools"))}
    (model / "config.json").write_text(json.dumps({**shape, "rope_theta": 1e6}))
    assert main(command) == 2
    assert "made with another config.json; repeat" in capsys.readouterr().err
    (model / "config.json").write_text(json.dumps(shape))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert main(command) == 2
    assert "made with another environment; repeat" in capsys.readouterr().err


def test_a_command_that_came_to_no_run_does_not_stand_in_the_way_of_another(fake: type[Fake], tmp_path: Path) -> None:
    command = [*GIVEN, *SYSTEMS, "--json", str(tmp_path / "x.json")]
    fake.fails = "vllm-bf16"
    assert main(command) == 2
    fake.fails = "kvcompile/kv8"
    assert main([*command, "--requests", "3"]) == 2
    install_again(fake)
    assert main([*command, "--requests", "3"]) == 0
    assert {name for name, _ in fake.asked} == {"kvcompile/kv8"}  # what the second has left is taken up


@pytest.mark.parametrize("text", ["x\n", "[]\n", '{"identity": 3}\n', '{"identity": {}}\n{"run": {}}\n'])
def test_a_file_of_something_else_is_told(
    fake: type[Fake], tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "x.json.state").write_text(text)
    assert main([*GIVEN, *SYSTEMS, "--json", str(tmp_path / "x.json")]) == 2
    said = capsys.readouterr().err
    assert "x.json.state" in said and "remove" in said and said.count("\n") == 1


def test_logs_of_engines_stay_where_a_run_fails_and_go_where_it_does_not(
    fake: type[Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Fake.__init__

    def logging(self: Fake, name: str, model: Path, arguments: dict[str, Any], log: Path, *more: Any) -> None:
        log.write_text("said")
        start(self, name, model, arguments, log, *more)

    monkeypatch.setattr(Fake, "__init__", logging)
    command = [*GIVEN, *SYSTEMS, "--json", str(tmp_path / "x.json")]
    assert main(command) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    fake.fails = "kvcompile/kv8"
    assert main(command) == 2
    assert [path.read_text() for path in tmp_path.glob("kvcompile-serve-*/kvcompile-kv8.log")] == ["said"]


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_options_come_from_a_file_and_flags_win(fake: type[Fake], tmp_path: Path, suffix: str) -> None:
    table = {"systems": ["vllm-bf16", "kvcompile/kv8"], "grid": "8:5", "requests": 3, "kv-gib": 4, "runs": 7}
    toml = "\n".join(f"{key} = {json.dumps(value)}" for key, value in table.items())
    path = tmp_path / f"grid{suffix}"
    path.write_text(toml if suffix == ".toml" else json.dumps(table))
    assert main(["bench", "serve", "llama-3.2-1b", "--config", str(path), "--runs", "1", "--total-gib", "10"]) == 0
    assert timed() == [(name, (8, 5, 3, 0)) for name in table["systems"]]
    assert len({given["kv_cache_memory_bytes"] for given in fake.arguments.values()}) == 1
    assert fake.arguments["vllm-bf16"]["kv_cache_memory_bytes"] > 7 << 30  # of 10 GiB in all, not 4


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.toml", 'grids = "8:5"', "unknown key 'grids'; allowed are systems, grid, requests, "),
        ("x.toml", 'requests = "3"', "requests is '3'; allowed is a whole number"),
        ("x.toml", "requests = true", "requests is true; allowed is a whole number"),
        ("x.json", '{"systems": [1]}', "systems is [1]; allowed is text, or a list of texts"),
        ("x.json", '{"requests": 0}', "--requests is 0; allowed is 1 or more"),
        ("x.json", '{"kv-gib": 1' + "0" * 400 + "}", "kv-gib is a number beyond all measure"),
        ("x.json", "[]", "holds no table of options"),
        ("x.json", "{", "cannot be read (Expecting property name"),
        ("x.toml", "= 1", "cannot be read (Invalid"),
        ("x.toml", "kv-gib = 1\ntotal-gib = 2", "--total-gib and --kv-gib are both given"),
        ("x.yaml", "", "allowed are files whose names end in .toml or .json"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_in_one_line(
    fake: type[Fake], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    assert main(["bench", "serve", "llama-3.2-1b", "--config", str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not fake.asked


def test_progress_is_for_a_terminal_alone(
    fake: type[Fake], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*GIVEN, *SYSTEMS]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(Console, "is_terminal", True)
    assert main([*GIVEN, *SYSTEMS]) == 0
    assert "8/8" in (said := capsys.readouterr().err) and "last: 16->3, kvcompile/kv8" in said


def test_the_table_is_markdown_too(fake: type[Fake], tmp_path: Path) -> None:
    assert main([*GIVEN, *SYSTEMS, "--markdown", str(tmp_path / "x.md")]) == 0
    lines = (tmp_path / "x.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 2 * 2 and len({line.count("|") for line in table}) == 1
    assert table[3].startswith("| 8->5 | kvcompile/kv8 | 20 (20 to 20) | 2.00x |")
    assert any(line.startswith("- Weights + KV: vllm-bf16 ") for line in lines)


def test_shares_of_fp8_are_shown_beside_those_of_the_first_system(fake: type[Fake], tmp_path: Path) -> None:
    given = ["--systems", "vllm-bf16,vllm-fp8,kvcompile/kv8", "--markdown", str(tmp_path / "x.md")]
    assert main([*GIVEN, *given]) == 0
    table = [line.split(" | ") for line in (tmp_path / "x.md").read_text().splitlines() if line.startswith("|")]
    assert table[0][3:5] == ["of vllm-bf16", "of vllm-fp8"]
    assert [line[3:5] for line in table[2:5]] == [["1.00x", "0.50x"], ["2.00x", "1.00x"], ["2.00x", "1.00x"]]


def test_bars_are_to_the_scale_of_their_case_and_lie_within_the_drawing(fake: type[Fake], tmp_path: Path) -> None:
    assert main([*GIVEN, *SYSTEMS, "--plot", str(tmp_path / "x.svg")]) == 0
    svg = ElementTree.parse(tmp_path / "x.svg").getroot()
    found = [each for each in svg.iter("{http://www.w3.org/2000/svg}rect") if len(each)]
    assert [each[0].text for each in found] == [
        "8->5, vllm-bf16: 10, 1.00x",
        "8->5, kvcompile/kv8: 20, 2.00x",
        "16->3, vllm-bf16: 6, 1.00x",
        "16->3, kvcompile/kv8: 12, 2.00x",
    ]
    widths = [float(each.get("width")) for each in found]
    assert widths[0] * 2 == widths[1] == widths[3]
    assert all(float(each.get("x")) + float(each.get("width")) <= float(svg.get("width")) for each in found)
    assert all(float(each.get("y")) + float(each.get("height")) <= float(svg.get("height")) for each in found)


def test_names_are_escaped_in_the_drawing() -> None:
    rows = [record.row("a & b", "<ours>", serve_plot.METRIC, "tokens/s", [1.0, 2.0])]
    ElementTree.fromstring(serve_plot.draw("x < y", rows))
