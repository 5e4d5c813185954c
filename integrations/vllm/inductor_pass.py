"""The one InductorPass that vLLM takes from outside: kvcompile's pipeline in vLLM's clothes."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch.fx
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.logger import init_logger

import kvcompile.integrations.vllm
import kvcompile.integrations.vllm.attention_op  # registers what a pass puts into graphs
from kvcompile.integrations.vllm.vector_isa import remember_checks
from kvcompile.passes.pipeline import PassPipeline, source_hash

logger = init_logger("vllm.kvcompile")

# vLLM adds a pass found under this key to its own pass manager, behind its fusions and before it lowers its IR.
PASS_KEY = "post_grad_custom_post_pass"


class KVCompilePass(InductorPass):
    """Runs kvcompile's pass pipeline on every graph that vLLM compiles.

    Holds plain data only: vLLM deep-copies it and pickles it to its engine and worker processes, and puts `uuid()` in
    every compile-cache key. `config`: the resolved configuration as nested plain values.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._pipeline: PassPipeline | None = None

        remember_checks()

    def __getstate__(self) -> dict[str, Any]:
        return {"_config": self._config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # In each process that the configuration reaches, and before anything is compiled there.
        self.__init__(state["_config"])

    @property
    def pipeline(self) -> PassPipeline:
        """Built on first use, in the process that compiles."""
        if self._pipeline is None:
            self._pipeline = PassPipeline(self._config)
        return self._pipeline

    def __call__(self, graph: torch.fx.Graph) -> None:
        nodes, start = len(graph.nodes), time.perf_counter()
        results = self.pipeline(graph)
        logger.info(
            "kvcompile passes: graph %d, %d nodes, %.1f ms: %s",
            self.pipeline.graphs_seen,
            nodes,
            (time.perf_counter() - start) * 1000,
            ", ".join(f"{r.name} {r.matched} of {r.candidates}" for r in results) or "all passes are switched off",
        )

    def uuid(self) -> str:
        """The pipeline's, and the sources of this package: its linear method and backend decide what is in a graph."""
        sources = source_hash(kvcompile.integrations.vllm)
        return hashlib.sha256(f"{self.pipeline.uuid()} {sources}".encode()).hexdigest()
