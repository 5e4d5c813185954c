"""The scheduler's half of pruning: say which requests end their prompt in a step, release pages when the worker has.

schedule()            plans of requests whose observation window the step touches, on the SchedulerOutput
update_from_output()  acknowledgements of the worker; only then pages are released. Without one the request goes on
                      unpruned, and nothing was lost. A prompt that is stored inline needs none: it never held them
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput

from kvcompile.config import PruneConfig, SchedulerConfig
from kvcompile.integrations.vllm import prune_manager
from kvcompile.integrations.vllm.metrics import (
    INLINE_PROMPTS,
    PRUNED_TOKENS,
    RECLAIMED_BLOCKS,
    REFUSED_PRUNES,
    SCORING_FAILURES,
)
from kvcompile.integrations.vllm.metrics_scheduler import Counting
from kvcompile.integrations.vllm.prune_reach import step_tokens
from kvcompile.presets import NAME
from kvcompile.prune.inline import InlinePolicy
from kvcompile.prune.plan import Plan

logger = init_logger("vllm.kvcompile")

# Attributes of vLLM's outputs of a step.
PLANS, ACKNOWLEDGED, FAILURES = "kvcompile_prune", "kvcompile_pruned", "kvcompile_prune_failures"


@dataclass(frozen=True)
class Step:
    """What a worker is told of a request. final: this step ends its prompt."""

    plan: Plan
    final: bool


class Pruning(Counting):
    """Stands before a scheduler class in the method resolution order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prune_config = PruneConfig(**self.vllm_config.additional_config[NAME]["prune"])
        policy = InlinePolicy(
            mode=self._prune_config.inline,
            caching=self.kv_cache_manager.enable_caching,
            step_tokens=step_tokens(self.scheduler_config),
            most_held=SchedulerConfig(**self.vllm_config.additional_config[NAME]["scheduler"]).max_wait_batches,
        )
        self.pruning = prune_manager.install(self.kv_cache_manager, self._prune_config, self.tally, policy)
        self.pruned_tokens = self.released_blocks = self.inline_prompts = self.scoring_failures = 0
        self.worker_refused = False  # the last that it was to prune: so it may the next
        self._refusals_said: set[str] = set()

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
        for request_id in (new.req_id for new in output.scheduled_new_reqs if new.req_id not in plans):
            request = self.requests[request_id]
            # Of those that come back runner V2 is told as of new ones.
            if not request.num_preemptions and (refusal := self.kv_cache_manager.refusal_of(request)):
                self._count_refusal(*refusal)
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        for request_id, epoch in getattr(model_runner_output, ACKNOWLEDGED, {}).items():
            if blocks := self.pruning.commit(request_id, epoch):
                self.released_blocks += blocks
                self.worker_refused = False
                self._count_pruned("two_phase", self.pruning.plans[request_id].first, blocks)
                self.on_release()
        for request_id, step in getattr(scheduler_output, PLANS, {}).items():
            plan = self.pruning.plans.get(request_id)
            if not step.final or plan != step.plan:  # it has been preempted or ended since
                continue
            if plan.inline:
                self.inline_prompts += 1
                self.tally.add(INLINE_PROMPTS)
                self._count_pruned("inline", plan.first, plan.released)
            elif request_id not in self.pruning.committed:
                self.worker_refused = True
                self._count_refusal("not_acknowledged", "the worker did not say that it has moved the tokens to keep")
        failures = getattr(model_runner_output, FAILURES, 0)
        self.scoring_failures += failures
        self.tally.add(SCORING_FAILURES, failures)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _count_pruned(self, way: str, tokens: int, blocks: int) -> None:
        self.pruned_tokens += tokens
        self.tally.add(PRUNED_TOKENS, tokens, way)
        self.tally.add(RECLAIMED_BLOCKS, blocks, way)

    def _count_refusal(self, reason: str, why: str) -> None:
        """Count a request that would have been pruned and is not, and say so once for each reason."""
        self.tally.add(REFUSED_PRUNES, label=reason)
        if reason not in self._refusals_said:
            self._refusals_said.add(reason)
            logger.warning("a request is not pruned: %s; others like it are counted under %s", why, reason)
