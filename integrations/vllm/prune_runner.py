"""The model runner (V1) of a worker that prunes: jobs for the layers, its own null blocks, the acknowledgement.

Coordinates stay natural, so nothing that prepares a step is touched: positions, sequence lengths, slots.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput

from kvcompile.config import PruneConfig
from kvcompile.integrations.vllm.prune_jobs import Jobs, Select
from kvcompile.integrations.vllm.prune_scheduler import ACKNOWLEDGED, PLANS
from kvcompile.ops import prune
from kvcompile.presets import NAME
from kvcompile.prune.plan import Plan

NULL_BLOCK = 0


def _move(kept: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], plan: Plan) -> None:
    """Of all layers: the kept tokens to the end of the prompt."""
    caches, rows, keeps = zip(*kept, strict=True)
    prune.prune_compact(list(caches), rows[0], list(keeps), plan.tokens, plan.first)


def _selector(config: PruneConfig) -> Select:
    method = prune.parse_method(config.method, window=config.window_tokens, sink=config.sink_tokens)

    def select(
        queries: torch.Tensor, kv_cache: torch.Tensor, table_row: torch.Tensor, tokens: int, kept: int, scale: float
    ) -> torch.Tensor:
        return prune.select(prune.prune_score(queries, kv_cache, table_row, tokens, scale, method), method, kept)

    return select


class PruningRunner:
    """Stands before vLLM's runner class in the method resolution order; a runner becomes one by `install`."""

    _jobs: Jobs

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        result = super()._update_states(scheduler_output)
        # Here, where input of the step before can no longer be on its way to a device: vLLM holds that back until then.
        for request_id, released in self._jobs.take_released().items():
            (block_ids,) = self.requests[request_id].block_ids
            block_ids[:released] = [NULL_BLOCK] * released
            row = self.input_batch.req_id_to_index.get(request_id)
            if row is not None:
                self.input_batch.block_table[0].block_table.np[row, :released] = NULL_BLOCK
        return result

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata, common = super()._build_attention_metadata(*args, **kwargs)
        jobs = self._jobs.of_step()
        rows = {self.input_batch.req_id_to_index[request_id]: job for request_id, job in jobs.items()}
        for each in {id(m): m for m in metadata.values()}.values():
            each.jobs.update(rows)
        return metadata, common

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        # Before anything of this step: an id may end and come again in it, and a preemption outside of `schedule()` (a
        # reset of the prefix cache) shows by the resumption alone.
        ended = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        for request_id in ended | scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self._jobs.forget(request_id)
        self._jobs.begin(getattr(scheduler_output, PLANS, {}))
        output = super().execute_model(scheduler_output, *args, **kwargs)
        self._acknowledged = self._jobs.end()
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)
        if self._acknowledged:
            # Asynchronous scheduling wraps it; the scheduler sees what is inside.
            setattr(getattr(output, "_model_runner_output", output), ACKNOWLEDGED, self._acknowledged)
        return output


def install(runner: Any) -> None:
    """Make a V1 runner, which its worker has just made, prune."""
    config = PruneConfig(**runner.vllm_config.additional_config[NAME]["prune"])
    kind = type(runner)
    if missing := [name for name in ("_update_states", "_build_attention_metadata") if not hasattr(kind, name)]:
        raise RuntimeError(f"pruning needs vLLM's model runner V1; {kind.__name__} has no {' and no '.join(missing)}")
    runner.__class__ = type(f"Pruning{kind.__name__}", (PruningRunner, kind), {})
    layers = runner.model_config.get_num_layers(runner.parallel_config)
    runner._jobs = Jobs(config.window_tokens, layers, _selector(config), _move)
    runner._acknowledged = {}
