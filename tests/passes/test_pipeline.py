"""The pass pipeline: order, counts, strictness, and vLLM's view of it. Its identity: test_pipeline_identity.py."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
import torch.fx

from kvcompile.config import resolve, to_dict
from kvcompile.passes import pipeline
from kvcompile.passes.pipeline import PassError, PassPipeline, PassResult
from tests.passes.rewrites import CONFIG, STRICT, Blind, NormQuant, SwigluQuant, Unlisted, graph_of, targets


@pytest.fixture
def warnings() -> list[str]:
    """What the pipeline's logger says; vLLM cuts its own loggers off from pytest's."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(f"{record.levelname}: {record.getMessage()}")

    handler = Keep()
    pipeline.logger.addHandler(handler)
    yield said
    pipeline.logger.removeHandler(handler)


def test_the_built_in_passes_leave_a_graph_alone_that_has_no_quantiser():
    ours = PassPipeline(CONFIG)
    graph = graph_of(torch.neg)
    assert ours.order == ("norm_quant", "swiglu_quant", "rotary", "attention_swap")
    assert ours(graph) == [PassResult(name, 0, 0) for name in ours.order]
    assert ours.graphs_seen == 1
    assert targets(graph) == [torch.neg]


def test_passes_run_in_the_given_order_each_on_the_result_of_the_one_before():
    forwards = PassPipeline(CONFIG, [NormQuant, SwigluQuant])
    graph = graph_of(torch.neg)
    assert forwards.order == ("norm_quant", "swiglu_quant")
    assert forwards(graph) == [PassResult("norm_quant", 1, 1), PassResult("swiglu_quant", 1, 1)]
    assert targets(graph) == [torch.exp]

    backwards = PassPipeline(CONFIG, [SwigluQuant, NormQuant])
    graph = graph_of(torch.neg)
    assert backwards.order == ("swiglu_quant", "norm_quant")
    assert backwards(graph) == [PassResult("swiglu_quant", 0, 0), PassResult("norm_quant", 1, 1)]
    assert targets(graph) == [torch.abs]


def test_a_pass_that_is_switched_off_does_not_run():
    off = to_dict(resolve(overrides={"passes.norm_quant": False}, environ={}).config)
    ours = PassPipeline(off, [NormQuant, SwigluQuant])
    graph = graph_of(torch.neg, torch.abs)
    assert ours.order == ("swiglu_quant",)
    assert ours(graph) == [PassResult("swiglu_quant", 1, 1)]
    assert targets(graph) == [torch.neg, torch.exp]
    assert ours.totals == {"swiglu_quant": PassResult("swiglu_quant", 1, 1)}


def test_a_pass_without_a_switch_always_runs():
    assert PassPipeline(CONFIG, [Unlisted]).order == ("unlisted",)


def test_counts_add_up_over_graphs():
    ours = PassPipeline(CONFIG, [NormQuant])
    assert ours.totals == {"norm_quant": PassResult("norm_quant", 0, 0)}
    assert ours(graph_of(torch.neg, torch.neg, torch.abs)) == [PassResult("norm_quant", 2, 3)]
    assert ours(graph_of(torch.sin)) == [PassResult("norm_quant", 0, 0)]
    assert ours(graph_of(torch.neg)) == [PassResult("norm_quant", 1, 1)]
    assert ours.graphs_seen == 3
    assert ours.totals == {"norm_quant": PassResult("norm_quant", 3, 4)}


def test_strict_raises_and_names_the_pass_and_the_graph():
    ours = PassPipeline(STRICT, [Blind, NormQuant])
    ours(graph_of(torch.sin))
    expected = (
        "pass attention_swap matched none of 2 candidate sites in graph 2: its pattern does not fit this graph "
        "(strict=true)"
    )
    with pytest.raises(PassError) as caught:
        ours(graph_of(torch.neg, torch.neg))
    assert str(caught.value) == expected


def test_without_strict_a_pass_that_matches_nothing_is_one_warning_and_the_others_run(warnings):
    ours = PassPipeline(CONFIG, [Blind, NormQuant])
    graph = graph_of(torch.neg)
    assert ours(graph) == [PassResult("attention_swap", 0, 1), PassResult("norm_quant", 1, 1)]
    assert targets(graph) == [torch.abs]
    assert warnings == [
        "WARNING: kvcompile pass attention_swap matched none of 1 candidate sites in graph 1: its pattern does not fit "
        "this graph; the model runs without it there"
    ]


@pytest.mark.parametrize("config", [CONFIG, STRICT], ids=["lenient", "strict"])
def test_a_graph_without_candidates_is_no_fault(config, warnings):
    ours = PassPipeline(config, [Blind])
    assert ours(graph_of(torch.sin)) == [PassResult("attention_swap", 0, 0)]
    assert warnings == []


def test_vllm_takes_the_pipeline_as_an_inductor_pass():
    from vllm.compilation.passes.inductor_pass import InductorPass

    from kvcompile.integrations.vllm.inductor_pass import PASS_KEY, KVCompilePass

    ours = KVCompilePass(CONFIG)
    assert isinstance(ours, InductorPass)
    assert PASS_KEY == "post_grad_custom_post_pass"
    graph = graph_of(torch.neg)
    assert ours(graph) is None
    assert ours.pipeline.graphs_seen == 1
    assert targets(graph) == [torch.neg]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p)), copy.copy], ids=["deepcopy", "pickle", "copy"]
)
def test_a_copy_of_the_inductor_pass_starts_afresh_with_the_same_configuration(copied):
    from kvcompile.integrations.vllm.inductor_pass import KVCompilePass

    ours = KVCompilePass(STRICT)
    ours(graph_of(torch.neg))
    other = copied(ours)
    assert type(other) is KVCompilePass
    assert other.uuid() == ours.uuid()
    assert other.uuid() != KVCompilePass(CONFIG).uuid()
    assert other.pipeline is not ours.pipeline
    assert (ours.pipeline.graphs_seen, other.pipeline.graphs_seen) == (1, 0)


def test_the_names_that_the_command_line_accepts_are_those_of_the_built_in_passes() -> None:
    from kvcompile.presets import PASS_NAMES

    assert tuple(graph_pass.name for graph_pass in pipeline.PASSES) == PASS_NAMES
