"""`kvcompile bench offload` without a GPU: options, checks and record, with a CPU's copies and a fake clock."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from kvcompile.cli import main
from kvcompile.integrations.vllm.offload_copies import CPUCopies
from kvcompile.tools import bench_cuda, bench_offload
from kvcompile.tools.bench_w4a8_systems import Unavailable

ARGUMENTS = ["bench", "offload", "--layers", "2", "--kv-heads", "1", "--head-size", "64", "--runs", "3"]
PAGE_BYTES = 2 * 2 * 16 * 68


class Copies(CPUCopies):
    """make: of the kernel that it stands for. spoils: whether a page is stored with another byte."""

    spoils = False

    def __init__(self, caches: Sequence[torch.Tensor], slots: int, make: object = None) -> None:
        super().__init__(caches, slots)

    def start_store(self, blocks: Sequence[int], slots: Sequence[int]) -> int:
        batch = super().start_store(blocks, slots)
        self._pool[slots[0], 7] ^= int(self.spoils)
        return batch

    def row(self, slot: int) -> torch.Tensor:
        return self._pool[slot]


class Link:
    def __init__(self, device: torch.device) -> None:
        assert device == torch.device("cpu")

    def store(self) -> None: ...

    def load(self) -> None: ...


class Pass:
    """Calls once; a pass took 100 us the first time that it is asked, then 125, and so on in turns."""

    def __init__(self, call: Callable[[int], object], copies: int) -> None:
        call(0)
        self._times = itertools.cycle((100.0, 125.0))

    def quick(self) -> float:
        return next(self._times)


def _missing(caches: Sequence[torch.Tensor], slots: int) -> Copies:
    raise Unavailable("cuGetProcAddress(cuMemcpyBatchAsync) failed")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cuda, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(bench_cuda, "Pass", Pass)
    monkeypatch.setattr(bench_offload, "Link", Link)
    monkeypatch.setattr(bench_offload, "KVCompile", Copies)
    for name, make in (("kvcompile", Copies), ("vllm-offload", _missing)):
        monkeypatch.setitem(bench_offload.SYSTEMS, name, make)
    monkeypatch.setattr(bench_offload, "_MATMUL", 16)
    monkeypatch.setattr(bench_offload, "_DECODE_TOKENS", 32)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clock = itertools.count(0.0, 1e-3)
    monkeypatch.setattr(bench_offload.time, "perf_counter", lambda: next(clock))


def test_the_record_has_every_way_and_batch_of_every_system_and_the_link(
    machine: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--pages", "3", "5", "--thread-blocks", "8", "16", "--json", str(tmp_path / "x.json")]
    assert main([*ARGUMENTS, *options]) == 0
    content = json.loads((tmp_path / "x.json").read_text())
    assert content["name"] == "offload"
    rows = {(row["case"], row["system"], row["metric"]): row for row in content["rows"]}
    ways = [f"{way} {pages}" for pages in (3, 5) for way in ("store", "load", "both")]
    metrics = ("time", "bandwidth", "share_of_link")
    beside = [f"{work} beside {way}" for way in ("store", "load") for work in ("matmul", "decode")]
    assert list(rows) == [
        *((f"{way} 1 GiB", "copy", "bandwidth") for way in ("store", "load", "both")),
        *(
            key
            for system in ("kvcompile", "kvcompile/16-blocks")
            for key in (
                *((case, system, metric) for case in ways for metric in metrics),
                *((case, system, "slowdown") for case in beside),
            )
        ),
    ]
    link = round(2**30 / 1e-3 / 1e9, 4)
    assert rows["load 1 GiB", "copy", "bandwidth"]["median"] == link
    assert rows["both 1 GiB", "copy", "bandwidth"]["median"] == round(2**31 / 1e-3 / 1e9, 4)
    assert rows["store 5", "kvcompile", "time"]["median"] == 1000
    assert rows["both 5", "kvcompile", "bandwidth"]["median"] == round(2 * 5 * PAGE_BYTES / 1e-3 / 1e9, 4)
    assert rows["load 3", "kvcompile", "share_of_link"]["median"] == round(100 * 3 * PAGE_BYTES / 2**30, 4)
    assert rows["decode beside load", "kvcompile", "slowdown"]["median"] == 25
    said = capsys.readouterr().out
    assert "kvcompile/16-blocks" in said and "25.0 (25.0 to 25.0)" in said
    assert "vllm-offload: not measured: cuGetProcAddress(cuMemcpyBatchAsync) failed" in said


def test_a_page_that_is_not_what_it_was_ends_it(
    machine: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Copies, "spoils", True)
    assert main([*ARGUMENTS, "--pages", "1"]) == 1
    said = capsys.readouterr().err
    assert said == "kvcompile bench: kvcompile: a page that was stored is another in the pool\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--head-size", "65"], "--head-size is 65; allowed are 64, 80, 96, 128, 256"),
        (["--layers", "0"], "--layers is 0; allowed is 1 or more"),
        (["--pages", "64", "0"], "--pages has 0; allowed is 1 or more"),
        (["--thread-blocks", "0"], "--thread-blocks has 0; allowed is 1 or more"),
        (["--json", "/nowhere/x.json"], "--json /nowhere/x.json: the folder does not exist"),
        ([], "this benchmark measures GPU kernels and finds no CUDA device"),
    ],
)
def test_wrong_options_are_told_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "offload", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
