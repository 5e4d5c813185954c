"""The scheduler's half of pruning: say which requests end their prompt in a step, release pages when the worker has.

schedule()            plans of requests whose observation window the step touches, on the SchedulerOutput
update_from_output()  acknowledgements of the worker; only then pages are released. Without one the request goes on
                      unpruned, and nothing was lost
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from kvcompile.config import PruneConfig
from kvcompile.integrations.vllm import prune_manager
from kvcompile.presets import NAME
from kvcompile.prune.plan import Plan

PLANS, ACKNOWLEDGED = "kvcompile_prune", "kvcompile_pruned"  # attributes of vLLM's outputs of a step


@dataclass(frozen=True)
class Step:
    """What a worker is told of a request. final: this step ends its prompt."""

    plan: Plan
    final: bool


class Pruning(Scheduler):
    """Stands before a scheduler class in the method resolution order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prune_config = PruneConfig(**self.vllm_config.additional_config[NAME]["prune"])
        self.pruning = prune_manager.install(self.kv_cache_manager, self._prune_config)
        self.pruned_tokens = self.released_blocks = 0

    def on_release(self) -> None:
        """Blocks have come back while their request goes on."""

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        plans, window = self.pruning.plans, self._prune_config.window_tokens
        steps = {}
        for request_id in output.num_scheduled_tokens if plans else ():
            if plan := plans.get(request_id):
                end = self.requests[request_id].num_computed_tokens
                # Every chunk that touches the window is announced: its queries are kept for the one that ends it.
                if plan.tokens - window < end <= plan.tokens:
                    steps[request_id] = Step(plan, final=end == plan.tokens)
        setattr(output, PLANS, steps)
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        for request_id, epoch in getattr(model_runner_output, ACKNOWLEDGED, {}).items():
            if blocks := self.pruning.commit(request_id, epoch):
                self.released_blocks += blocks
                self.pruned_tokens += self.pruning.plans[request_id].first
                self.on_release()
        return super().update_from_output(scheduler_output, model_runner_output)
