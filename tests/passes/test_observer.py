"""What an observer of the pipeline is shown, and that the passes do the same with and without one."""

from __future__ import annotations

import pytest
import torch
import torch.fx

from kvcompile.config import KVCompileConfig, to_dict
from kvcompile.passes.pipeline import PassError, PassPipeline, PassResult, observed_by

CONFIG = to_dict(KVCompileConfig())


class _Rewrite:
    """Turns `seek` into `put`."""

    def __call__(self, graph: torch.fx.Graph) -> PassResult:
        found = [node for node in graph.nodes if node.target is self.seek]
        for node in found:
            node.target = self.put
        return PassResult(self.name, len(found), len(found))


class First(_Rewrite):
    name, seek, put = "first", torch.neg, torch.abs


class Second(_Rewrite):
    name, seek, put = "second", torch.abs, torch.exp


class Blind:
    name = "blind"

    def __call__(self, graph: torch.fx.Graph) -> PassResult:
        return PassResult(self.name, 0, 1)


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def before(self, number: int, graph: torch.fx.Graph) -> None:
        self.seen.append((number, _targets(graph)))

    def after(self, name: str, graph: torch.fx.Graph, result: PassResult) -> None:
        self.seen.append((name, _targets(graph), result.matched))


def _targets(graph: torch.fx.Graph) -> list[object]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def _graph() -> torch.fx.Graph:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.neg, (graph.placeholder("x"),)))
    return graph


def test_an_observer_sees_each_graph_before_and_after_every_pass() -> None:
    recorder, ours = Recorder(), PassPipeline(CONFIG, [First, Second])
    with observed_by(recorder):
        ours(_graph())
        ours(_graph())
    one = [("first", [torch.abs], 1), ("second", [torch.exp], 1)]
    assert recorder.seen == [(1, [torch.neg]), *one, (2, [torch.neg]), *one]


def test_nobody_is_told_before_or_after_and_the_result_is_the_same() -> None:
    recorder, ours = Recorder(), PassPipeline(CONFIG, [First, Second])
    with observed_by(recorder):
        watched = ours(_graph())
        seen = len(recorder.seen)
    assert PassPipeline.observer is None
    assert ours(_graph()) == watched
    assert len(recorder.seen) == seen


def test_an_observer_does_not_change_the_identity_that_caches_go_by() -> None:
    alone = PassPipeline(CONFIG).uuid()
    with observed_by(Recorder()):
        assert PassPipeline(CONFIG).uuid() == alone


def test_what_strict_refuses_has_been_shown_first_and_the_observer_is_gone_afterwards() -> None:
    recorder = Recorder()
    with pytest.raises(PassError), observed_by(recorder):
        PassPipeline({**CONFIG, "strict": True}, [Blind])(_graph())
    assert recorder.seen == [(1, [torch.neg]), ("blind", [torch.neg], 0)]
    assert PassPipeline.observer is None
