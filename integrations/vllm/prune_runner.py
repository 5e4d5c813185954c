"""The model runner of a worker that prunes: jobs for the layers, its own null blocks, the acknowledgement.

Coordinates stay natural, so nothing that prepares a step is touched: positions, sequence lengths, slots. Here is what
vLLM's two runners share, and what is of V1; `prune_runner_v2.py` has the rest.

A step with a job must not be replayed as one CUDA graph of the whole model, which runs no Python: no layer would score.
A prompt's last chunk of one token looks like a decode, for which vLLM would take such a graph. Of a piecewise graph
attention is never a part, whichever way vLLM splits it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.core.sched.output import SchedulerOutput

from kvcompile.config import PruneConfig
from kvcompile.integrations.vllm import prune_ranks
from kvcompile.integrations.vllm.attention_shared import attach
from kvcompile.integrations.vllm.prune_jobs import Choose, Jobs, Score
from kvcompile.integrations.vllm.prune_rehearsal import rehearse
from kvcompile.integrations.vllm.prune_scheduler import ACKNOWLEDGED, FAILURES, PLANS
from kvcompile.integrations.vllm.prune_weights import output_weights
from kvcompile.ops import prune
from kvcompile.presets import NAME
from kvcompile.prune.plan import Plan

NULL_BLOCK = 0
_OF_V1 = ("_update_states", "_build_attention_metadata", "_determine_batch_execution_and_padding")


def _move(kept: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], plan: Plan) -> None:
    """Of all layers: the kept tokens to the end of the prompt."""
    caches, rows, keeps = zip(*kept, strict=True)
    prune.prune_compact(list(caches), rows[0], list(keeps), plan.tokens, plan.first)


def _method(config: PruneConfig, weights: Mapping[str, torch.Tensor]) -> tuple[Score, Choose]:
    """weights: of the output projections, by layer, for a method that needs them; filled when the model is loaded."""
    method = prune.parse_method(config.method, window=config.window_tokens, sink=config.sink_tokens)

    def score(
        layer: str, queries: torch.Tensor, kv_cache: torch.Tensor, table_row: torch.Tensor, tokens: int, scale: float
    ) -> torch.Tensor:
        weight = weights.get(layer)
        return prune.prune_score(queries, kv_cache, table_row, tokens, scale, method, output_weight=weight)

    def choose(scores: list[torch.Tensor], kept: int) -> list[torch.Tensor]:
        return prune.select_layers(scores, method, kept)

    return score, choose


class PruningSteps:
    """What a runner of either version does around a step. Stands before vLLM's class in the method resolution order."""

    _jobs: Jobs
    _acknowledged: dict[str, int]
    _weights: dict[str, torch.Tensor]
    _score: Score
    _choose: Choose

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if PruneConfig(**self.vllm_config.additional_config[NAME]["prune"]).method == "critical":
            # Now, while what it takes is counted as the model's memory.
            layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
            self._weights.update(output_weights(self.model, layers))

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        super().profile_run(*args, **kwargs)
        rehearse(self, self._score, self._choose, _move)

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        # Before anything of this step: an id may end and come again in it, and a preemption outside of `schedule()` (a
        # reset of the prefix cache) shows by the resumption alone; for V2 that is a new request.
        ended = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        ended = ended | {new.req_id for new in scheduler_output.scheduled_new_reqs}
        for request_id in ended | scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self._jobs.forget(request_id)
        self._jobs.begin(getattr(scheduler_output, PLANS, {}))
        output = super().execute_model(scheduler_output, *args, **kwargs)
        self._acknowledged = self._jobs.end()
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)
        failures = self._jobs.take_failures()
        if self._acknowledged or failures:
            # Asynchronous scheduling wraps it, in each runner under its own name; the scheduler sees what is inside.
            inner = getattr(output, "_model_runner_output", getattr(output, "model_runner_output", output))
            setattr(inner, ACKNOWLEDGED, self._acknowledged)
            setattr(inner, FAILURES, failures)
        return output


class PruningRunner(PruningSteps):
    """V1."""

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
        if jobs := self._jobs.of_step():
            rows = {self.input_batch.req_id_to_index[request_id]: job for request_id, job in jobs.items()}
            attach(metadata.values(), rows)
        return metadata, common

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        if self._jobs.of_step():
            # All that vLLM makes of this here: no graph of the whole model.
            kwargs["use_cascade_attn"] = True
        return super()._determine_batch_execution_and_padding(*args, **kwargs)


def install(runner: Any) -> None:
    """Make a V1 runner, which its worker has just made, prune."""
    become(runner, PruningRunner, "V1", _OF_V1)


def become(runner: Any, pruning: type, version: str, needed: Sequence[str]) -> None:
    """Put `pruning` before the class of a runner, which has to have the methods `needed`."""
    config = PruneConfig(**runner.vllm_config.additional_config[NAME]["prune"])
    kind = type(runner)
    if missing := [name for name in needed if not hasattr(kind, name)]:
        raise RuntimeError(
            f"pruning needs vLLM's model runner {version}; {kind.__name__} has no {' and no '.join(missing)}"
        )
    runner.__class__ = type(f"Pruning{kind.__name__}", (pruning, kind), {})
    layers = runner.model_config.get_num_layers(runner.parallel_config)
    runner._weights = {}
    runner._score, runner._choose = _method(config, runner._weights)
    runner._jobs = Jobs(config.window_tokens, layers, runner._score, runner._choose, _move, prune_ranks.agreement())
    runner._acknowledged = {}
