"""`kvcompile bench`: which benchmarks there are."""

from __future__ import annotations

import pytest

from kvcompile.cli import main


def test_without_a_benchmark_the_error_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert capsys.readouterr() == (
        "",
        "kvcompile: error: no benchmark is given; allowed are decode, attention, w4a8, act-quant, prune, offload, "
        "schedule, serve, host; see kvcompile bench --help\n",
    )


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("decode", "--prompt-tokens"),
        ("w4a8", "--tune-seconds"),
        ("act-quant", "--hidden"),
        ("prune", "--methods"),
        ("offload", "--thread-blocks"),
        ("schedule", "--step-time"),
    ],
)
def test_each_benchmark_has_its_own_options(name: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", name, "--help"]) == 0
    assert option in capsys.readouterr().out
