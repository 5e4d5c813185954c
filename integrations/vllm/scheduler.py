"""The schedulers that a configuration may name: in our order or vLLM's own, pruned or not, offloading or not."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from kvcompile.integrations.vllm.active import offloads, prunes
from kvcompile.integrations.vllm.length_aware import LengthAware
from kvcompile.integrations.vllm.prune_manager import PruningCacheManager, computed_before
from kvcompile.integrations.vllm.prune_scheduler import Pruning
from kvcompile.schedule.block_demand import Holding


class LengthAwareScheduler(LengthAware):
    """For synchronous scheduling."""


class LengthAwareAsyncScheduler(LengthAware, AsyncScheduler):
    """For asynchronous scheduling, which counts tokens that are not there yet."""


class PruningLengthAware(Pruning, LengthAware):
    """Whose requests are pruned, whichever way it schedules: they are counted with what they will really hold."""

    _manager: PruningCacheManager

    def on_release(self) -> None:
        self._refused = None

    def _admit(self, request: Request, num_new_tokens: int, **kwargs: Any) -> KVCacheBlocks | None:
        if request is self._refused:
            return None
        blocks = self._manager.in_some_way(self._allocate_if_it_lasts, request, num_new_tokens, **kwargs)
        plan = self.pruning.plans.get(request.request_id)
        if blocks is not None or plan and self._manager.would_split(plan, num_new_tokens, computed_before(**kwargs)):
            self._refused = None  # the next step may have room for all of the prompt, which then needs fewer blocks
        return blocks

    def _allocate(self, request: Request, num_new_tokens: int, **kwargs: Any) -> KVCacheBlocks | None:
        return self._manager.allocate_as_decided(request, num_new_tokens, **kwargs)

    def _holding_of_new(self, request: Request, num_new_tokens: int, **kwargs: Any) -> Holding:
        holding = super()._holding_of_new(request, num_new_tokens, **kwargs)
        plan = self.pruning.plans.get(request.request_id)
        computed = request.num_computed_tokens + computed_before(**kwargs)
        if plan is None or plan.inline or self.worker_refused or computed + num_new_tokens != plan.tokens:
            return holding
        # All that it takes from the pool but what it keeps; pages that others hold too do not come back.
        return holding._replace(pruned=holding.missing - (holding.blocks - plan.released))

    def _resident_tokens(self, request: Request) -> int:
        plan = self._manager.plan_of(request)
        return plan.kept if plan else request.num_tokens

    def _most_hits(self, request: Request) -> int:
        most, plan = super()._most_hits(request), self._manager.plan_of(request)
        if plan is None:
            return most
        return min(most, plan.first) if self.pruning.policy.uses_hits(plan) else 0


class PruningLengthAwareScheduler(PruningLengthAware, LengthAwareScheduler):
    """For synchronous scheduling, and pruned."""


class PruningLengthAwareAsyncScheduler(PruningLengthAware, LengthAwareAsyncScheduler):
    """For asynchronous scheduling, and pruned."""


class PruningScheduler(Pruning, Scheduler):
    """In vLLM's order, and pruned."""


class PruningAsyncScheduler(Pruning, AsyncScheduler):
    """In vLLM's order, asynchronously, and pruned."""


def make_scheduler(vllm_config: Any, **kwargs: Any) -> Scheduler:
    """The scheduler for a configuration: vLLM calls what `scheduler_cls` names, once it knows how it schedules."""
    if prunes(vllm_config):
        kinds = PruningLengthAwareScheduler, PruningLengthAwareAsyncScheduler
    else:
        kinds = LengthAwareScheduler, LengthAwareAsyncScheduler
    return _make(kinds, vllm_config, **kwargs)


def make_pruning_scheduler(vllm_config: Any, **kwargs: Any) -> Scheduler:
    """As `make_scheduler`, where requests are pruned and kvcompile's order is off."""
    return _make((PruningScheduler, PruningAsyncScheduler), vllm_config, **kwargs)


def make_offloading_scheduler(vllm_config: Any, **kwargs: Any) -> Scheduler:
    """As `make_scheduler`, where requests are saved when they are preempted, and kvcompile's order is off."""
    return _make((Scheduler, AsyncScheduler), vllm_config, **kwargs)


def _make(kinds: tuple[type[Scheduler], type[Scheduler]], vllm_config: Any, **kwargs: Any) -> Scheduler:
    """Of these, the one for synchronous or for asynchronous scheduling, offloading where that is on."""
    kind = kinds[bool(vllm_config.scheduler_config.async_scheduling)]
    if offloads(vllm_config):
        # Not at the top: with it come the connector and what copies, of which nobody else has a use.
        from kvcompile.integrations.vllm.offload_length_aware import offloading

        kind = offloading(kind)
    return kind(vllm_config=vllm_config, **kwargs)
