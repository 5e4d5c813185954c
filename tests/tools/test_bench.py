"""`kvcompile bench`: which benchmarks there are."""

from __future__ import annotations

import pytest

from kvcompile.cli import main


def test_without_a_benchmark_the_error_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert main(["bench", "nothing"]) == 2
    assert (
        "invalid choice: 'nothing' (choose from 'decode', 'w4a8', 'act_quant', 'schedule')" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("name", "option"),
    [("decode", "--prompt-tokens"), ("w4a8", "--tune-seconds"), ("act_quant", "--hidden"), ("schedule", "--step-time")],
)
def test_each_benchmark_has_its_own_options(name: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", name, "--help"]) == 0
    assert option in capsys.readouterr().out
