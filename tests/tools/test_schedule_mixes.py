"""The generated mixes and traces from a CSV, with one line for what is wrong in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcompile.config import UsageError
from kvcompile.schedule.trace import H200_LLAMA_8B, Arrival, Step
from kvcompile.tools.schedule_mixes import LIMIT_TOKENS, MIXES, read_trace


@pytest.mark.parametrize("name", MIXES)
def test_a_mix_is_in_order_of_arrival_the_same_for_its_seed_and_fits_its_pool(name: str) -> None:
    mix = MIXES[name]
    trace = mix.trace(200, seed=3)
    assert len(trace) == 200
    assert trace == mix.trace(200, seed=3) != mix.trace(200, seed=4)
    assert [a.time_s for a in trace] == sorted(a.time_s for a in trace)
    for arrival in trace:
        assert 1 <= arrival.output_tokens <= arrival.max_tokens == LIMIT_TOKENS
        assert arrival.prefix_tokens < arrival.prompt_tokens
        assert arrival.prompt_tokens + arrival.max_tokens <= 16 * (mix.blocks - 1)


def test_the_step_time_gives_back_what_it_was_made_from() -> None:
    """32 requests of 1,000 + 128 tokens: four steps of 8,192 prompt tokens, then 128 of 32 requests."""
    prefill = sum(H200_LLAMA_8B.seconds(Step(8000, 0, 8000)) for _ in range(4))
    decode = sum(H200_LLAMA_8B.seconds(Step(0, 32, 32 * (1000 + i))) for i in range(128))
    assert prefill + decode == pytest.approx(1.503, rel=0.01)  # serve.json


def test_nothing_to_compute_takes_no_time() -> None:
    assert H200_LLAMA_8B.seconds(Step(0, 0, 0)) == 0


def _csv(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_a_csv_is_read_in_order_of_arrival_and_the_longest_output_is_everybodys_limit(tmp_path: Path) -> None:
    path = _csv(tmp_path, "prompt_tokens,arrival_s,output_tokens\n10,1.5,7\n20,0,30\n")
    assert read_trace(path) == [Arrival(0.0, 20, 30, 30), Arrival(1.5, 10, 7, 30)]


def test_limits_and_priorities_may_be_in_the_csv(tmp_path: Path) -> None:
    path = _csv(tmp_path, "arrival_s,prompt_tokens,output_tokens,max_tokens,priority\n0,10,7,64,-2\n")
    assert read_trace(path) == [Arrival(0.0, 10, 7, 64, priority=-2)]


WRONG = {
    "no column": ("arrival_s,prompt_tokens\n0,1\n", ": no column output_tokens; needed are arrival_s, prompt_tokens, "),
    "empty": ("", ": no column arrival_s, prompt_tokens, output_tokens; needed are "),
    "no line": ("arrival_s,prompt_tokens,output_tokens\n", ": no request in it; give one line for each"),
    "zero": (
        "arrival_s,prompt_tokens,output_tokens\n0,5,5\n0,0,5\n",
        ", line 3: prompt_tokens is '0'; allowed is a whole",
    ),
    "text": (
        "arrival_s,prompt_tokens,output_tokens\nsoon,5,5\n",
        ", line 2: arrival_s is 'soon'; allowed is a number of",
    ),
    "nan": ("arrival_s,prompt_tokens,output_tokens\nnan,5,5\n", ", line 2: arrival_s is 'nan'; allowed is a number of"),
    "fraction": (
        "arrival_s,prompt_tokens,output_tokens\n0,5,2.5\n",
        ", line 2: output_tokens is '2.5'; allowed is a whole",
    ),
    "short line": (
        "arrival_s,prompt_tokens,output_tokens\n0,5\n",
        ", line 2: output_tokens is none; allowed is a whole",
    ),
    "limit": (
        "arrival_s,prompt_tokens,output_tokens,max_tokens\n0,5,9,8\n",
        ", line 2: max_tokens is '8'; allowed is a whole number, 9 or more",
    ),
}


@pytest.mark.parametrize(("text", "says"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_in_a_csv_is_said_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = _csv(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(f"--trace {path}{says}")
    assert message.splitlines() == [message]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.csv: cannot be read \(No such file or directory\); give a CSV file"):
        read_trace(tmp_path / "none.csv")
