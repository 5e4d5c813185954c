"""The pass pipeline: order, counts, strictness, and an identity that changes with everything that changes a graph."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.fx

import kvcompile.ops
import kvcompile.passes
from kvcompile.config import KVCompileConfig, resolve, to_dict
from kvcompile.passes import pipeline
from kvcompile.passes.pipeline import PassError, PassPipeline, PassResult

CONFIG = to_dict(KVCompileConfig())
STRICT = {**CONFIG, "strict": True}


class _Rewrite:
    """A pass that turns every call of `seek` into `put`; every call of either is a candidate."""

    name = "rewrite"
    seek = torch.neg
    put = torch.abs

    def __call__(self, graph: torch.fx.Graph) -> PassResult:
        nodes = [n for n in graph.nodes if n.target in (self.seek, self.put)]
        matched = [n for n in nodes if n.target is self.seek]
        for node in matched:
            node.target = self.put
        return PassResult(self.name, len(matched), len(nodes))


class NormQuant(_Rewrite):
    name = "norm_quant"


class SwigluQuant(_Rewrite):
    name = "swiglu_quant"
    seek = torch.abs
    put = torch.exp


class Unlisted(_Rewrite):
    """Its name is no key of the configuration."""

    name = "unlisted"


class Blind:
    """Every call of `neg` is a candidate; it never matches one."""

    name = "attention_swap"

    def __call__(self, graph: torch.fx.Graph) -> PassResult:
        return PassResult(self.name, 0, sum(n.target is torch.neg for n in graph.nodes))


def _graph(*functions: object) -> torch.fx.Graph:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    for function in functions:
        node = graph.call_function(function, (node,))
    graph.output(node)
    return graph


def _targets(graph: torch.fx.Graph) -> list[object]:
    return [n.target for n in graph.nodes if n.op == "call_function"]


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


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources that `source_hash` reads from now on: folders `ops` and `passes`."""
    for package in (kvcompile.ops, kvcompile.passes):
        folder = Path(package.__file__).parent
        name = package.__name__.rpartition(".")[2]
        shutil.copytree(folder, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        monkeypatch.setattr(package, "__file__", str(tmp_path / name / "__init__.py"))
    pipeline.source_hash.cache_clear()
    yield tmp_path
    pipeline.source_hash.cache_clear()


def _uuid_of_edited_sources() -> str:
    pipeline.source_hash.cache_clear()
    return PassPipeline(CONFIG).uuid()


def test_the_built_in_passes_leave_a_graph_alone_that_has_no_quantiser():
    ours = PassPipeline(CONFIG)
    graph = _graph(torch.neg)
    assert ours.order == ("norm_quant", "swiglu_quant", "attention_swap")
    assert ours(graph) == [PassResult(name, 0, 0) for name in ours.order]
    assert ours.graphs_seen == 1
    assert _targets(graph) == [torch.neg]


def test_passes_run_in_the_given_order_each_on_the_result_of_the_one_before():
    forwards = PassPipeline(CONFIG, [NormQuant, SwigluQuant])
    graph = _graph(torch.neg)
    assert forwards.order == ("norm_quant", "swiglu_quant")
    assert forwards(graph) == [PassResult("norm_quant", 1, 1), PassResult("swiglu_quant", 1, 1)]
    assert _targets(graph) == [torch.exp]

    backwards = PassPipeline(CONFIG, [SwigluQuant, NormQuant])
    graph = _graph(torch.neg)
    assert backwards.order == ("swiglu_quant", "norm_quant")
    assert backwards(graph) == [PassResult("swiglu_quant", 0, 0), PassResult("norm_quant", 1, 1)]
    assert _targets(graph) == [torch.abs]


def test_a_pass_that_is_switched_off_does_not_run():
    off = to_dict(resolve(overrides={"passes.norm_quant": False}, environ={}).config)
    ours = PassPipeline(off, [NormQuant, SwigluQuant])
    graph = _graph(torch.neg, torch.abs)
    assert ours.order == ("swiglu_quant",)
    assert ours(graph) == [PassResult("swiglu_quant", 1, 1)]
    assert _targets(graph) == [torch.neg, torch.exp]
    assert ours.totals == {"swiglu_quant": PassResult("swiglu_quant", 1, 1)}


def test_a_pass_without_a_switch_always_runs():
    assert PassPipeline(CONFIG, [Unlisted]).order == ("unlisted",)


def test_counts_add_up_over_graphs():
    ours = PassPipeline(CONFIG, [NormQuant])
    assert ours.totals == {"norm_quant": PassResult("norm_quant", 0, 0)}
    assert ours(_graph(torch.neg, torch.neg, torch.abs)) == [PassResult("norm_quant", 2, 3)]
    assert ours(_graph(torch.sin)) == [PassResult("norm_quant", 0, 0)]
    assert ours(_graph(torch.neg)) == [PassResult("norm_quant", 1, 1)]
    assert ours.graphs_seen == 3
    assert ours.totals == {"norm_quant": PassResult("norm_quant", 3, 4)}


def test_strict_raises_and_names_the_pass_and_the_graph():
    ours = PassPipeline(STRICT, [Blind, NormQuant])
    ours(_graph(torch.sin))
    expected = (
        "pass attention_swap matched none of 2 candidate sites in graph 2: its pattern does not fit this graph "
        "(strict=true)"
    )
    with pytest.raises(PassError) as caught:
        ours(_graph(torch.neg, torch.neg))
    assert str(caught.value) == expected


def test_without_strict_a_pass_that_matches_nothing_is_one_warning_and_the_others_run(warnings):
    ours = PassPipeline(CONFIG, [Blind, NormQuant])
    graph = _graph(torch.neg)
    assert ours(graph) == [PassResult("attention_swap", 0, 1), PassResult("norm_quant", 1, 1)]
    assert _targets(graph) == [torch.abs]
    assert warnings == [
        "WARNING: kvcompile pass attention_swap matched none of 1 candidate sites in graph 1: its pattern does not fit "
        "this graph; the model runs without it there"
    ]


@pytest.mark.parametrize("config", [CONFIG, STRICT], ids=["lenient", "strict"])
def test_a_graph_without_candidates_is_no_fault(config, warnings):
    ours = PassPipeline(config, [Blind])
    assert ours(_graph(torch.sin)) == [PassResult("attention_swap", 0, 0)]
    assert warnings == []


def test_the_uuid_is_a_sha256_and_the_same_for_equal_pipelines():
    first = PassPipeline(CONFIG, [NormQuant, SwigluQuant]).uuid()
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert PassPipeline(copy.deepcopy(CONFIG), [NormQuant, SwigluQuant]).uuid() == first


def test_the_uuid_does_not_depend_on_what_has_been_compiled():
    ours = PassPipeline(CONFIG, [NormQuant])
    before = ours.uuid()
    ours(_graph(torch.neg))
    assert ours.uuid() == before


def test_the_uuid_changes_with_the_order_of_the_passes():
    uuids = {PassPipeline(CONFIG, passes).uuid() for passes in ([NormQuant, SwigluQuant], [SwigluQuant, NormQuant], [])}
    assert len(uuids) == 3


@pytest.mark.parametrize(
    "change", [{"strict": True}, {"passes.norm_quant": False}, {"kv8.enabled": False}, {"prune.keep_ratio": 0.25}]
)
def test_the_uuid_changes_with_every_value_of_the_configuration(change):
    changed = to_dict(resolve(overrides=change, environ={}).config)
    assert PassPipeline(changed).uuid() != PassPipeline(CONFIG).uuid()


@pytest.mark.parametrize("file", ["passes/pipeline.py", "ops/__init__.py", "ops/kv8/op.py"])
def test_the_uuid_changes_with_the_content_of_any_source_file(sources, file):
    before = _uuid_of_edited_sources()
    path = sources / file
    path.write_bytes(path.read_bytes() + b"\n")
    assert _uuid_of_edited_sources() != before


@pytest.mark.parametrize("file", ["ops/kv8/store.cu", "ops/kv8/tile.cuh", "passes/other.py"])
def test_the_uuid_changes_when_a_source_file_appears_moves_or_goes(sources, file):
    before = _uuid_of_edited_sources()
    (sources / file).write_text("// 1\n")
    added = _uuid_of_edited_sources()
    (sources / file).rename((sources / file).with_stem("moved"))
    moved = _uuid_of_edited_sources()
    (sources / file).with_stem("moved").unlink()
    assert len({before, added, moved}) == 3
    assert _uuid_of_edited_sources() == before


def test_the_uuid_does_not_change_with_what_is_no_source(sources):
    before = _uuid_of_edited_sources()
    (sources / "ops" / "notes.txt").write_text("no source")
    (sources / "ops" / "__pycache__").mkdir()
    (sources / "ops" / "__pycache__" / "op.cpython-311.pyc").write_bytes(b"\0")
    assert _uuid_of_edited_sources() == before


def test_the_uuid_does_not_depend_on_where_kvcompile_is_installed(sources):
    elsewhere = _uuid_of_edited_sources()
    for package in (kvcompile.ops, kvcompile.passes):
        package.__file__ = str(Path(package.__path__[0]) / "__init__.py")
    assert _uuid_of_edited_sources() == elsewhere


def test_the_uuid_changes_when_an_operator_is_registered():
    before = PassPipeline(CONFIG).uuid()
    with torch.library._scoped_library("kvcompile", "FRAGMENT") as library:
        library.define("registered_by_a_test(Tensor a) -> Tensor")
        assert "kvcompile::registered_by_a_test(Tensor a) -> Tensor" in pipeline.operator_schemas()
        assert PassPipeline(CONFIG).uuid() != before
    assert PassPipeline(CONFIG).uuid() == before


def test_operators_of_others_are_not_in_the_uuid():
    schemas = pipeline.operator_schemas()
    assert schemas == sorted(schemas)
    names = [s.partition("(")[0] for s in schemas]
    assert [name for name in names if "::kv8" in name] == ["kvcompile::kv8_attention", "kvcompile::kv8_store"]
    assert all(s.startswith("kvcompile::") for s in schemas)


OTHER_PROCESS = """
import json, sys
from kvcompile.integrations.vllm.inductor_pass import KVCompilePass
first = KVCompilePass(json.loads(sys.argv[1])).uuid()
import kvcompile.ops.kv8
import vllm.model_executor.layers.attention
print(first, KVCompilePass(json.loads(sys.argv[1])).uuid())
"""


def test_the_uuid_is_the_same_in_another_process_whatever_it_has_imported():
    from kvcompile.integrations.vllm.inductor_pass import KVCompilePass

    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, json.dumps(CONFIG)],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    # vLLM writes to the standard output too.
    assert done.stdout.split()[-2:] == [KVCompilePass(CONFIG).uuid()] * 2


def test_vllm_takes_the_pipeline_as_an_inductor_pass():
    from vllm.compilation.passes.inductor_pass import InductorPass

    from kvcompile.integrations.vllm.inductor_pass import PASS_KEY, KVCompilePass

    ours = KVCompilePass(CONFIG)
    assert isinstance(ours, InductorPass)
    assert PASS_KEY == "post_grad_custom_post_pass"
    graph = _graph(torch.neg)
    assert ours(graph) is None
    assert ours.pipeline.graphs_seen == 1
    assert _targets(graph) == [torch.neg]


def test_the_identity_that_vllm_sees_covers_the_sources_that_reach_into_vllm_too(sources, monkeypatch):
    import kvcompile.integrations.vllm as integration
    from kvcompile.integrations.vllm.inductor_pass import KVCompilePass

    folder = Path(integration.__file__).parent
    shutil.copytree(folder, sources / "vllm", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(integration, "__file__", str(sources / "vllm" / "__init__.py"))

    def uuid() -> str:
        pipeline.source_hash.cache_clear()
        return KVCompilePass(CONFIG).uuid()

    seen = {uuid()}
    assert seen == {uuid()}
    # What a linear puts into a graph, what registers the attention operator, and a pass.
    for file in ("vllm/linear.py", "vllm/attention_op.py", "passes/attention_swap.py", "ops/w4a8/op.py"):
        path = sources / file
        path.write_bytes(path.read_bytes() + b"\n")
        seen.add(uuid())
    assert len(seen) == 5


def test_the_attention_operators_schema_is_part_of_the_identity():
    from kvcompile.integrations.vllm.inductor_pass import KVCompilePass

    KVCompilePass(CONFIG)
    assert [s for s in pipeline.operator_schemas() if s.startswith("kvcompile::pruned_kv8_attention(")] != []


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p)), copy.copy], ids=["deepcopy", "pickle", "copy"]
)
def test_a_copy_of_the_inductor_pass_starts_afresh_with_the_same_configuration(copied):
    from kvcompile.integrations.vllm.inductor_pass import KVCompilePass

    ours = KVCompilePass(STRICT)
    ours(_graph(torch.neg))
    other = copied(ours)
    assert type(other) is KVCompilePass
    assert other.uuid() == ours.uuid()
    assert other.uuid() != KVCompilePass(CONFIG).uuid()
    assert other.pipeline is not ours.pipeline
    assert (ours.pipeline.graphs_seen, other.pipeline.graphs_seen) == (1, 0)


def test_the_names_that_the_command_line_accepts_are_those_of_the_built_in_passes() -> None:
    from kvcompile.presets import PASS_NAMES

    assert tuple(graph_pass.name for graph_pass in pipeline.PASSES) == PASS_NAMES
