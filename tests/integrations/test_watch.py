"""What `kvcompile graph-dump` refuses before anything is compiled, and how a graph is followed up to the passes."""

from __future__ import annotations

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


def test_what_a_strict_pass_refuses_is_told_and_the_graph_is_kept(build: Callable[..., Any]) -> None:
    def refuse(*_: Any) -> None:
        raise PassError("pass x matched none of 2 candidate sites")

    watcher = _Watcher()
    with pytest.raises(watch._PassesRan):
        watch._Seen(watcher, build()).run_passes(refuse)(None, None)
    assert watcher.faults == ["pass x matched none of 2 candidate sites"]
