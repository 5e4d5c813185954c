"""What `kvcompile graph-dump` refuses before anything is compiled, and how a graph is followed up to the passes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config.utils import Range

from kvcompile.config import UsageError
from kvcompile.integrations.vllm import watch
from kvcompile.passes.pipeline import PassError
from kvcompile.tools.graph_recorder import Recorder

MEMORY = "--kv-cache-memory-bytes=67108864"


def _refused(model: str | Path, *arguments: str) -> str:
    recorder = Recorder()
    with pytest.raises(UsageError) as caught:
        watch.compile_model(str(model), [*arguments], recorder)
    assert recorder.graphs() == []
    message = str(caught.value)
    assert message.splitlines() == [message]
    return message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--enforce-eager"], "no graph reaches the passes (--enforce-eager: nothing is compiled)"),
        (["-cc.mode=0"], "no graph reaches the passes (compilation mode NONE: nothing is compiled)"),
        (["-O0"], "no graph reaches the passes (compilation mode NONE"),
        (["-cc.backend=eager"], "no graph reaches the passes (compilation backend eager runs no passes)"),
        (["--tensor-parallel-size", "2"], "ask for 2 processes"),
        (["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'], "leave it out"),
        (["--port", "8000"], "unrecognized arguments: --port 8000; allowed are the flags of `vllm serve`"),
        (["--dtype", "float99"], "argument --dtype: invalid choice"),
        (["-cc.nothing=1"], "nothing"),
        (["-cc.kvcompile.kv9=1"], "unknown key 'kv9'"),
        (["--help"], "unrecognized arguments"),
    ],
)
def test_flags_that_leave_nothing_to_see_or_are_wrong_are_refused_in_one_line(
    llama: Path, arguments: list[str], said: str
) -> None:
    assert said in _refused(llama, MEMORY, *arguments)


def test_an_unknown_model_and_an_unsupported_one_are_refused_in_one_line(
    tmp_path: Path, checkpoint: Callable[..., Path]
) -> None:
    assert "no such folder" in _refused(tmp_path / "nowhere")
    gpt2 = checkpoint(architectures=["GPT2LMHeadModel"], model_type="gpt2", n_embd=128, n_head=2, n_layer=1)
    assert "GPT2LMHeadModel is not supported" in _refused(gpt2, MEMORY)


def _configured(monkeypatch: pytest.MonkeyPatch, model: Path, *arguments: str) -> Recorder:
    """What the watcher has been told when the engine is started, which it is not here."""

    def start(*_: Any, **__: Any) -> None:
        raise watch._AllSeen

    monkeypatch.setattr(watch.LLMEngine, "from_vllm_config", start)
    recorder = Recorder()
    watch.compile_model(str(model), [*arguments], recorder)
    return recorder


@pytest.mark.parametrize("level", ["INFO", "ERROR", "CRITICAL"])
def test_the_start_up_line_is_told_whatever_the_log_shows(
    llama: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    logger = logging.getLogger("vllm.kvcompile")
    monkeypatch.setattr(logger, "level", logging.getLevelName(level))
    logger.manager._clear_cache()
    try:
        line = _configured(monkeypatch, llama).startup_line
    finally:
        logger.manager._clear_cache()
    assert line.startswith("kvcompile ")
    assert "active: kv8 (" in line


def test_a_context_that_our_own_size_of_the_cache_has_no_room_for_is_compiled_and_the_users_own_is_judged(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = checkpoint(max_position_embeddings=1 << 24)
    assert _configured(monkeypatch, long).settings["max_model_len"] == 1 << 24
    assert "one request of 16777216 tokens needs" in _refused(long, MEMORY)
    monkeypatch.setattr(watch.checks_memory.current_platform, "mem_get_info", lambda *_: (0, 8 << 30))
    assert _configured(monkeypatch, long).startup_line


def test_a_compiler_switched_off_by_the_environment_is_named(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    said = _refused(llama, MEMORY)
    assert "no graph reaches the passes (TORCHDYNAMO_DISABLE is set: nothing is compiled)" in said


class _Manager:
    def __init__(self) -> None:
        self.loaded_artifacts: dict[str, Any] = {}


class _Watcher(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[Any] = []

    def piece(self, number: int, *_: Any) -> None:
        self.said.append(number)

    def same_as(self, number: int, tokens: tuple[int, int]) -> None:
        self.said.append(("same as", number, tokens))


def test_a_piece_whose_key_is_known_shares_the_graph_of_the_one_that_had_it_first(build: Callable[..., Any]) -> None:
    watcher, manager = _Watcher(), _Manager()
    seen = watch._Seen(watcher, build())
    key = seen.cache_key(lambda name: (name, None))
    run_passes = seen.run_passes(lambda ours, graph: None)

    def inductor(manager: _Manager, graph: Any, name: str, **_: Any) -> Any:
        key(name)
        if name in manager.loaded_artifacts:
            return manager.loaded_artifacts[name]
        run_passes(None, None)

    compile_piece = seen.compile(inductor)
    graphs = [torch.fx.GraphModule({}, torch.fx.Graph()) for _ in range(4)]
    for number, name in enumerate("abba"):
        compiled = compile_piece(manager, graphs[number], name, graph_index=number, compile_range=Range(1, 8))
        assert compiled is graphs["ab".index(name)]
    assert watcher.said == [0, 1, 2, ("same as", 1, (1, 8)), 3, ("same as", 0, (1, 8))]


def _piece(build: Callable[..., Any], sizes: object) -> None:
    compile_piece = watch._Seen(_Watcher(), build()).compile(lambda manager, graph, **_: graph)
    compile_piece(_Manager(), torch.fx.GraphModule({}, torch.fx.Graph()), graph_index=3, compile_range=sizes)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (Range(1, 8), "piece 3 was compiled without a pass being called"),
        ("all", "piece 3 is compiled for 'all' instead of a range of batch sizes"),
    ],
)
def test_a_compilation_that_cannot_be_followed_is_said_in_one_line_of_our_own(
    llama: Path, build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, sizes: object, said: str
) -> None:
    monkeypatch.setattr(watch.LLMEngine, "from_vllm_config", lambda *_, **__: _piece(build, sizes))
    refused = _refused(llama, MEMORY)
    assert refused.startswith(f"model {llama}: {said}, so its graph cannot be shown; leave out what of these flags")


def test_what_a_strict_pass_refuses_is_told_and_the_graph_is_kept(build: Callable[..., Any]) -> None:
    def refuse(*_: Any) -> None:
        raise PassError("pass x matched none of 2 candidate sites")

    watcher = _Watcher()
    with pytest.raises(watch._PassesRan):
        watch._Seen(watcher, build()).run_passes(refuse)(None, None)
    assert watcher.faults == ["pass x matched none of 2 candidate sites"]
