"""The pipeline's identity in compile caches changes with everything that changes a graph, and with nothing else."""

from __future__ import annotations

import copy
import json
import os
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
from kvcompile.config import resolve, to_dict
from kvcompile.passes import pipeline
from kvcompile.passes.pipeline import PassPipeline
from tests.passes.rewrites import CONFIG, NormQuant, SwigluQuant, graph_of


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


def test_the_uuid_is_a_sha256_and_the_same_for_equal_pipelines():
    first = PassPipeline(CONFIG, [NormQuant, SwigluQuant]).uuid()
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert PassPipeline(copy.deepcopy(CONFIG), [NormQuant, SwigluQuant]).uuid() == first


def test_the_uuid_does_not_depend_on_what_has_been_compiled():
    ours = PassPipeline(CONFIG, [NormQuant])
    before = ours.uuid()
    ours(graph_of(torch.neg))
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


@pytest.mark.parametrize("file", ["ops/kv8/other.cu", "ops/kv8/other.cuh", "passes/other.py"])
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
    ours = ("kv8_attention", "kv8_decode", "kv8_dequantise", "kv8_store")
    assert [name for name in names if "::kv8" in name] == [f"kvcompile::{name}" for name in ours]
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
