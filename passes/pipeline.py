"""The ordered list of FX passes, what they matched, and the identity that keeps compile caches honest.

A pass rewrites a post-grad graph in place:

    class NormQuant:
        name = "norm_quant"                     # the key of `passes.<name>` in the configuration
        def __call__(self, graph) -> PassResult

`candidates` counts the places that the pass is for (for a fusion: the quantisers of what it fuses them with, in
whatever form), `matched` those that it rewrote. Candidates without any match mean that the pattern no longer fits
vLLM's graph, which would be silently slow: an error in strict mode, a warning that names the pass otherwise.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Protocol

import torch
import torch.fx

import kvcompile.ops
import kvcompile.ops.kv8
import kvcompile.passes
from kvcompile.passes.attention_swap import AttentionSwap
from kvcompile.passes.norm_quant import NormQuant
from kvcompile.passes.result import PassResult
from kvcompile.passes.rotary import Rotary
from kvcompile.passes.swiglu_quant import SwigluQuant

logger = logging.getLogger("vllm.kvcompile.passes")

_REASONS = 3  # of a pass that matched nothing, given in its message


class PassError(RuntimeError):
    """A pass matched nothing although the graph holds what it is for, and the configuration is strict."""


# In the order in which they run. A quantiser has one producer, so neither of the fusions takes a site from the other,
# and rotary embedding has part in neither; the swap comes last, so that a pass in front of it still finds attention by
# vLLM's name.
PASSES: tuple[type, ...] = (NormQuant, SwigluQuant, Rotary, AttentionSwap)


class Observer(Protocol):
    """Is shown each graph as the passes leave it. It reads; the graph belongs to the passes and changes afterwards."""

    def before(self, number: int, graph: torch.fx.Graph) -> None:
        """No pass has run yet on the pipeline's graph `number`, from 1."""

    def after(self, name: str, graph: torch.fx.Graph, result: PassResult) -> None:
        """Pass `name` has run on the graph of the last `before`; what it did is not judged yet."""


class PassPipeline:
    """Runs the configured passes in order on each graph and keeps count.

    `config`: the resolved configuration as nested plain values (`passes.<name>`: bool, `strict`: bool). `passes`
    replaces the built-in list.
    """

    # Of every pipeline in this process: vLLM copies them as it likes. See `observed_by`.
    observer: ClassVar[Observer | None] = None

    def __init__(self, config: Mapping[str, Any], passes: Iterable[type] | None = None) -> None:
        self._config = config
        enabled = config["passes"]
        self._passes = [p() for p in (PASSES if passes is None else passes) if enabled.get(p.name, True)]
        self.graphs_seen = 0
        self.totals: dict[str, PassResult] = {p.name: PassResult(p.name, 0, 0) for p in self._passes}

    @property
    def order(self) -> tuple[str, ...]:
        """Names of the passes that run, in order."""
        return tuple(p.name for p in self._passes)

    def __call__(self, graph: torch.fx.Graph) -> list[PassResult]:
        """Rewrite `graph` in place. Raises `PassError` (strict) where a pass finds candidates and matches none."""
        self.graphs_seen += 1
        observer = PassPipeline.observer
        if observer is not None:
            observer.before(self.graphs_seen, graph)
        results = []
        for graph_pass in self._passes:
            result = graph_pass(graph)
            if observer is not None:
                observer.after(graph_pass.name, graph, result)
            for reason in result.refused:
                logger.debug("kvcompile pass %s, graph %d, left alone: %s", result.name, self.graphs_seen, reason)
            self._judge(result)
            total = self.totals[result.name]
            self.totals[result.name] = PassResult(
                result.name, total.matched + result.matched, total.candidates + result.candidates
            )
            results.append(result)
        return results

    def _judge(self, result: PassResult) -> None:
        if result.matched or not result.candidates:
            return
        message = (
            f"pass {result.name} matched none of {result.candidates} candidate sites in graph {self.graphs_seen}: "
            "its pattern does not fit this graph"
        )
        if result.refused:
            message = f"{message} ({'; '.join(result.refused[:_REASONS])})"
        if self._config["strict"]:
            raise PassError(f"{message} (strict=true)")
        logger.warning("kvcompile %s; the model runs without it there", message)

    def uuid(self) -> str:
        """Identity for compile caches, sha256 hex: passes in order, their sources, the configuration, operator schemas.

        A cache that did not see one of these change would serve the old graph without running any pass.
        """
        state = {
            "order": [f"{type(p).__module__}.{type(p).__qualname__}" for p in self._passes],
            "sources": source_hash(),
            "config": self._config,
            "schemas": operator_schemas(),
        }
        return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Every pipeline in this process shows its graphs to `observer` meanwhile."""
    before, PassPipeline.observer = PassPipeline.observer, observer
    try:
        yield
    finally:
        PassPipeline.observer = before


@cache
def source_hash(*packages: ModuleType) -> str:
    """sha256 hex over path and content of every source file of `packages`.

    Without any: of what can change a graph or what an operator computes, as far as that is no affair of vLLM's.
    """
    digest = hashlib.sha256()
    for package in packages or (kvcompile.ops, kvcompile.passes):
        root = Path(package.__file__).parent
        for path in sorted(p for p in root.rglob("*") if p.suffix in {".py", ".cu", ".cuh"}):
            digest.update(f"{package.__name__}/{path.relative_to(root).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def operator_schemas() -> list[str]:
    """The schemas of all operators registered under `kvcompile::`, sorted.

    Every operator family of `kvcompile.ops` is loaded first, so that it does not matter what of them this process
    happened to import so far. An integration's own operators are among them where that has registered them.
    """
    for module in pkgutil.iter_modules(kvcompile.ops.__path__, f"{kvcompile.ops.__name__}."):
        importlib.import_module(module.name)
    return sorted(str(s) for s in torch._C._jit_get_all_schemas() if s.name.startswith("kvcompile::"))
