"""Model runner V2 of a worker that prunes: as `prune_runner.py` does for V1, through V2's own parts.

V2 has a table of pages on the device, of which it gathers the rows of a step, a state of the model, which builds the
metadata of attention, and a manager of CUDA graphs. A request that was preempted comes back to it as a new one.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from kvcompile.integrations.vllm import prune_runner
from kvcompile.integrations.vllm.attention_shared import attach
from kvcompile.integrations.vllm.prune_jobs import Jobs


def pruning_state(kind: type, jobs: Jobs) -> type:
    """A class of a model's state, made to tell attention which rows are observed.

    Derived from `kind` alone: CPython gives an object another class only if both have the same first base's layout,
    and with a class of ours in front of one whose root is an ABC they have not.
    """

    class PruningModelState(kind):
        def prepare_attn(self, input_batch: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            metadata = super().prepare_attn(input_batch, *args, **kwargs)
            if of_step := jobs.of_step():
                places = {request_id: row for row, request_id in enumerate(input_batch.req_ids)}
                rows = {places[request_id]: job for request_id, job in of_step.items()}
                attach(metadata.values(), rows)
            return metadata

    return PruningModelState


def pruning_graphs(kind: type, jobs: Jobs) -> type:
    """A class of a runner's manager of CUDA graphs, made to use none of the whole model where a prompt is observed."""

    class PruningGraphs(kind):
        def dispatch(self, num_reqs: int, num_tokens: int, uniform_token_count: int | None) -> BatchExecutionDescriptor:
            # Of the whole model there are graphs for rows of one token alone, as our attention's builder says it
            # must be.
            uniform = None if jobs.of_step() else uniform_token_count
            return super().dispatch(num_reqs, num_tokens, uniform)

    return PruningGraphs


class PruningRunnerV2(prune_runner.PruningSteps):
    """V2."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.model_state.__class__ = pruning_state(type(self.model_state), self._jobs)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        self.cudagraph_manager.__class__ = pruning_graphs(type(self.cudagraph_manager), self._jobs)

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        super().update_requests(scheduler_output)
        # On the device and in its own order: behind the step whose layers still read these pages, before this one's
        # rows are gathered. Not staged as vLLM's own writes are, of which there is room for one a request and step.
        table = self.block_tables.block_tables[0].gpu
        for request_id, released in self._jobs.take_released().items():
            table[self.req_states.req_id_to_index[request_id], :released].fill_(prune_runner.NULL_BLOCK)


def install(runner: Any) -> None:
    """Make a V2 runner, which its worker has just made, prune."""
    prune_runner.become(runner, PruningRunnerV2, "V2", ("update_requests", "load_model", "initialize_kv_cache"))
