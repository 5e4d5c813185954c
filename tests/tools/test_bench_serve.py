"""`kvcompile bench serve` without an engine: options, turns, record."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.tools.fake_served import Fake, install

from kvcompile.cli import main
from kvcompile.config import UsageError
from kvcompile.tools import bench_serve, model_shapes, serve_gpus, serve_memory, serve_options
from kvcompile.tools.serve_systems import SYSTEMS

ARGUMENTS = ["bench", "serve", "llama-3.2-1b", "--grid", "8:5,16:3", "--requests", "4", "--runs", "2"]
TWO = ["--systems", "vllm-bf16,kvcompile/kv8"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    return install(monkeypatch)


def starts_and_ends() -> list[tuple[str, str]]:
    return [(name, what) for name, what in Fake.asked if isinstance(what, str)]


def test_the_record_has_every_case_and_system(
    fake: type[Fake], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ARGUMENTS, *TWO, "--json", str(tmp_path / "x.json")]) == 0
    written = json.loads((tmp_path / "x.json").read_text())
    rows = {(r["case"], r["system"], r["metric"]): r for r in written["rows"]}

    def median(system: str, metric: str, case: str = "16->3") -> float:
        return rows[case, system, metric]["median"]

    assert (median("vllm-bf16", "output_throughput", "8->5"), median("kvcompile/kv8", "output_throughput")) == (10, 12)
    assert median("vllm-bf16", "total_throughput", "8->5") == 4 * 13 / 2
    assert [median("kvcompile/kv8", f"ttft_{kind}") for kind in ("mean", "p50", "p99")] == [0.25, 0.2, 0.4]
    assert [median("kvcompile/kv8", f"tpot_{kind}") for kind in ("mean", "p50", "p99")] == [10, 10, 10]
    assert rows["16->3", "kvcompile/kv8", "preemptions"]["max"] == 1
    assert (median("vllm-bf16", "peak_blocks"), median("vllm-bf16", "peak_running")) == (40, 4)
    assert {r["runs"] for (case, *_), r in rows.items() if case not in ("KV cache", "memory")} == {2}
    assert (
        written["systems"]["kvcompile/kv8"]["gpu"] == 0 and written["systems"]["kvcompile/kv8"]["attention"] == "CUSTOM"
    )
    said = capsys.readouterr().out
    assert "2.00x" in said and "vllm-bf16 served all requests at once, without preemption, in: no case." in said


def test_weights_and_cache_of_every_system_add_up_to_the_total(fake: type[Fake], tmp_path: Path) -> None:
    assert main([*ARGUMENTS, "--total-gib", "10", "--json", str(tmp_path / "x.json")]) == 0
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    of = {(r["system"], r["metric"]): r["median"] for r in rows if r["case"] == "memory"}
    names = [name for name, system in SYSTEMS.items() if not system.named]
    assert [name for name in SYSTEMS if (name, "kv") in of] == names
    assert all(of[name, "weights"] + of[name, "kv"] == pytest.approx(10, abs=1e-3) for name in names)
    assert of["kvcompile", "kv"] > of["vllm-fp8", "kv"] > of["vllm-bf16", "kv"] == of["kvcompile/kv8", "kv"]


def test_with_a_size_of_the_cache_each_system_has_that(fake: type[Fake]) -> None:
    assert main([*ARGUMENTS, "--kv-gib", "2"]) == 0
    assert {given["kv_cache_memory_bytes"] for given in fake.arguments.values()} == {2 << 30}


def test_counted_weights_are_those_of_the_tensors() -> None:
    config = model_shapes.SHAPES["llama-3.1-8b"]
    linears, rest = 6_979_321_856, 2 * (2 * 128256 * 4096 + 65 * 4096) + 131072 * 128 * 2
    assert serve_memory.weight_bytes(config, "bf16") == 2 * linears + rest
    assert serve_memory.weight_bytes(config, "fp8") == linears + 4 * 7 * 32 + rest
    rows = 32 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096)
    saved = 128256 * (4096 - 2)  # the head is int8, a bf16 scale a row
    assert serve_memory.weight_bytes(config, "w4a8") == linears // 2 + linears // 128 * 2 + 4 * rows + rest - saved
    tied, norms = {**config, "tie_word_embeddings": True}, 2 * 65 * 4096 + 131072 * 128 * 2
    embedding = 2 * 128256 * 4096
    assert serve_memory.weight_bytes(tied, "w4a8") == linears // 2 + linears // 128 * 2 + 4 * rows + embedding + norms
    assert (2**30 * 26) // serve_memory.block_bytes(config, "auto") == 13312
    assert (2**30 * 26) // serve_memory.block_bytes(config, "int8_per_token_head") == 25817


def test_the_head_of_w4a8_is_what_a_server_of_as_many_requests_has(fake: type[Fake]) -> None:
    cache = {}
    for most, asked in ((64, "always"), (65, "never")):
        options = ["--systems", "kvcompile", "--max-num-seqs", str(most), "--total-gib", "10"]
        assert main(["bench", "serve", "llama-3.1-8b", *ARGUMENTS[3:], *options]) == 0
        given = fake.arguments["kvcompile"]
        assert given["additional_config"]["kvcompile"]["linear"]["lm_head_int8"] == asked
        cache[asked] = given["kv_cache_memory_bytes"]
    assert cache["always"] - cache["never"] == 128256 * (4096 - 2)


def test_each_part_alone_switches_every_other_off() -> None:
    for name, part in {"kv8": "kv8", "w4a8": "linear", "scheduler": "scheduler"}.items():
        options = SYSTEMS[f"kvcompile/{name}"].arguments["additional_config"]["kvcompile"]
        assert [each for each, option in options.items() if isinstance(option, dict) and option.get("enabled")] == [
            part
        ]
        assert options["passes"]["norm_quant"] is options["passes"]["swiglu_quant"] is (name == "w4a8")
        assert options["passes"]["attention_swap"] is (name == "kv8")


def test_one_by_one_an_engine_is_gone_before_the_next_starts(fake: type[Fake]) -> None:
    assert main([*ARGUMENTS, *TWO]) == 0
    assert starts_and_ends() == [(name, what) for name in TWO[1].split(",") for what in ("start", "close")]


def test_together_they_take_turns_run_by_run(fake: type[Fake]) -> None:
    assert main([*ARGUMENTS, *TWO, "--together"]) == 0
    timed = [(name, what) for name, what in fake.asked if not isinstance(what, str) and what[3] < 1000]
    assert [name for name, _ in timed] == ["vllm-bf16", "kvcompile/kv8"] * 4
    assert [what for _, what in timed[:4]] == [(8, 5, 4, 0), (8, 5, 4, 0), (8, 5, 4, 1), (8, 5, 4, 1)]
    assert [what for _, what in fake.asked[:2]] == ["start", "start"]


def test_before_the_first_run_of_a_case_all_its_requests_have_run_together_shortly(fake: type[Fake]) -> None:
    grid = ["--grid", "512:512,4096:512,16000:2048,9000:4:2", "--requests", "32", "--runs", "1"]
    assert main(["bench", "serve", "llama-3.1-8b", *grid, "--systems", "vllm-bf16"]) == 0
    asked = [what for _, what in fake.asked if not isinstance(what, str)]
    assert [(prompt, output, requests) for prompt, output, requests, _ in asked] == [
        *[(512, 16, 32), (512, 512, 32)],
        *[(4096, 16, 16), (2048, 16, 32), (4096, 512, 32)],
        *[(16000, 16, 4), (2048, 16, 32), (16000, 2048, 32)],
        *[(9000, 4, 2), (9000, 4, 2)],
    ]
    assert len({(prompt, output, seed) for prompt, output, _, seed in asked}) == len(asked)  # other tokens each time


def test_two_gpus_work_side_by_side_on_cores_of_their_own(
    fake: type[Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    fake.meet = threading.Barrier(2)  # one alone would wait in vain
    assert main([*ARGUMENTS, *TWO, "--gpus", "1,0", "--json", str(tmp_path / "x.json")]) == 0
    assert fake.placed == {"vllm-bf16": ("7", (0, 1)), "kvcompile/kv8": ("4", (2, 3))}
    systems = json.loads((tmp_path / "x.json").read_text())["systems"]
    assert {name: facts["gpu"] for name, facts in systems.items()} == {"vllm-bf16": 1, "kvcompile/kv8": 0}


def test_an_engine_that_ends_ends_those_of_other_gpus(fake: type[Fake], capsys: pytest.CaptureFixture[str]) -> None:
    fake.fails = "kvcompile/kv8"
    assert main([*ARGUMENTS, *TWO, "--gpus", "0,1"]) == 2
    assert capsys.readouterr().err.strip().endswith("kvcompile/kv8: the engine ended: out of luck")
    assert {name for name, what in starts_and_ends() if what == "close"} == set(TWO[1].split(","))


def test_a_limit_of_time_leaves_no_engine_behind(fake: type[Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    before, closed, close = signal.getsignal(signal.SIGTERM), threading.Event(), Fake.close

    def told_to_end(self: Fake, *_: int) -> dict[str, Any]:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert closed.wait(timeout=30)
        raise UsageError("the engine ended")

    monkeypatch.setattr(Fake, "run", told_to_end)
    monkeypatch.setattr(Fake, "close", lambda self: (close(self), closed.set()))
    with pytest.raises(SystemExit) as end:
        main([*ARGUMENTS, *TWO])
    assert end.value.code == 128 + signal.SIGTERM
    assert starts_and_ends() == [("vllm-bf16", "start"), ("vllm-bf16", "close")]
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"graphs": "NONE"}, "vllm-bf16: graphs is NONE and not FULL_AND_PIECEWISE"),
        ({"kvcompile": True}, "vllm-bf16: kvcompile is True and not False"),
        ({"weight_bytes": 1 << 30}, "vllm-bf16: the engine has 1,073,741,824 bytes of weights where 2,"),
        ({"blocks": 7}, "vllm-bf16: the engine has 7 of KV blocks where "),
    ],
)
def test_a_system_that_is_not_what_it_should_be_ends_it(
    fake: type[Fake], capsys: pytest.CaptureFixture[str], facts: dict[str, Any], message: str
) -> None:
    fake.facts_of = facts
    assert main(ARGUMENTS) == 2
    assert message in capsys.readouterr().err
    assert fake.asked[-1] == ("vllm-bf16", "close")


@pytest.mark.parametrize("found", [{"pruned_tokens": 4 * 448 - 1}, {"pruned_tokens": 4 * 448, "not_pruned": 1}])
def test_a_system_that_should_prune_and_does_not_ends_it(
    fake: type[Fake], capsys: pytest.CaptureFixture[str], found: dict[str, int]
) -> None:
    fake.found_of = found
    assert main([*ARGUMENTS, "--grid", "1000:5", "--systems", "kvcompile/prune"]) == 2
    assert "kvcompile/prune, 1000->5: 1,79" in capsys.readouterr().err


def test_what_pruning_did_is_in_the_record(fake: type[Fake], tmp_path: Path) -> None:
    fake.found_of = {"pruned_tokens": 4 * 448}
    given = ["--grid", "1000:5", "--systems", "kvcompile/prune,kvcompile/kv8", "--json", str(tmp_path / "x.json")]
    assert main([*ARGUMENTS, *given]) == 0
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    found = {(r["system"], r["metric"]): r["median"] for r in rows}
    assert found["kvcompile/prune", "pruned_tokens"] == 1792 and found["kvcompile/prune", "resident_tokens"] == 7
    assert ("kvcompile/kv8", "pruned_tokens") not in found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x"], "model x: neither a folder with a config.json nor a known shape; shapes are llama-3.1-8b"),
        (["--grid", "8"], "--grid is '8'; allowed are PROMPT:OUTPUT pairs"),
        (["--grid", "8:0"], "--grid is '8:0'; allowed are PROMPT:OUTPUT pairs"),
        (["--grid", "8:1:0"], "--grid is '8:1:0'; allowed are PROMPT:OUTPUT pairs"),
        (["--grid", "8:1,8:1"], "--grid is '8:1,8:1'; a case is there twice"),
        (["--systems", "vllm-bf16,x"], "--systems has 'x'; allowed are vllm-bf16, vllm-fp8, vllm-int8, "),
        (["--runs", "0"], "--runs is 0; allowed is 1 or more"),
        (["--kv-gib", "0"], "--kv-gib is 0.0; allowed is more than 0"),
        (["--plot", "x.png"], "--plot x.png: it draws SVG alone; end the name in .svg"),
        (["--json", "/nowhere/x.json"], "--json /nowhere/x.json: the folder does not exist"),
        (["--total-gib", "nan"], "--total-gib is nan; allowed is more than 0"),
        (["--kv-gib", "1", "--total-gib", "2"], "--total-gib and --kv-gib are both given"),
        (["--total-gib", "16"], "--total-gib 16: vllm-bf16 needs 2.2"),
        (["--kv-gib", "1"], "--kv-gib 1: vllm-bf16 needs 2.2"),
        (["--total-gib", "137"], "GPU 0 has 140.0 GiB, and vllm-bf16, "),
        (["--together"], "GPU 0 has 140.0 GiB, and vllm-bf16, vllm-fp8"),
        (["--gpus", "2"], "--gpus is '2'; allowed are different numbers from 0 to 1, as in 0,1"),
        (["--gpus", "9" * 5000], "--gpus is '999"),
        (["--total-gib", "1e300"], "--total-gib is 1e+300; allowed is more than 0, up to 1,000,000"),
        (["--json", "x", "--markdown", "./x"], "--markdown x: --json is written there; name another"),
        (["--gpus", "0,00"], "--gpus is '0,00'; allowed are different numbers"),
    ],
)
def test_wrong_options_are_told_in_one_line(
    fake: type[Fake], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    model = [] if arguments == ["x"] else ["llama-3.1-8b"]
    try:
        code = main(["bench", "serve", *model, *arguments])
    except SystemExit as end:  # what argparse finds
        code = end.code
    assert code == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not fake.asked


def test_a_gpu_without_fp8_runs_all_but_that(
    fake: type[Fake], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_gpus, "found", lambda: [((8, 6), 80 << 30)])
    assert main(ARGUMENTS) == 0
    assert "vllm-fp8" not in fake.arguments and "vllm-offload" in fake.arguments
    assert main([*ARGUMENTS, "--systems", "vllm-fp8"]) == 2
    assert "--systems has vllm-fp8: it needs compute capability 8.9, the GPU has 8.6" in capsys.readouterr().err


def test_a_model_that_is_quantised_already_is_refused(
    fake: type[Fake], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = {**model_shapes.SHAPES["llama-3.2-1b"], "quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["bench", "serve", str(tmp_path)]) == 2
    assert "quantised by awq already, and systems quantise for themselves" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"),
    [("architectures", ["GPT2LMHeadModel"]), ("max_position_embeddings", "x"), ("num_key_value_heads", 3)],
)
def test_a_model_that_could_not_be_served_is_refused_before_an_engine_starts(
    fake: type[Fake], capsys: pytest.CaptureFixture[str], tmp_path: Path, key: str, value: object
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**model_shapes.SHAPES["llama-3.2-1b"], key: value}))
    assert main(["bench", "serve", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"config.json: {key} is " in said and said.count("\n") == 1 and not fake.asked


def test_cases_are_read_and_named() -> None:
    cases = bench_serve.grid("512:128,4096:512:8", 32)
    assert [case.name for case in cases] == ["512->128", "4096->512 x8"] and [c.requests for c in cases] == [32, 8]
    assert bench_serve.grid(serve_options.GRID, 32)[-1][:3] == (16000, 2048, 32)


def test_a_folder_with_a_checkpoint_is_taken_as_it_is(tiny_llama: Path, tmp_path: Path) -> None:
    assert model_shapes.folder_of(str(tiny_llama), tmp_path) == tiny_llama
    config = json.loads((model_shapes.folder_of("llama-3.1-8b", tmp_path) / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (4096, 32, 128256)
