"""Block accounting of pruned requests, in vLLM's own managers: every length stays natural, and the first columns of a
pruned request's table are the null block.

Installed on the managers of a running scheduler by changing their class: they are made deep inside vLLM, and what is
added is a dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from kvcompile.config import PruneConfig, UsageError
from kvcompile.integrations.vllm.metrics import RESIDENT_TOKENS, Tally
from kvcompile.prune import plan as planning
from kvcompile.prune.inline import TWO_PHASE, InlinePolicy
from kvcompile.prune.plan import Plan


class PruningManager(FullAttentionManager):
    """vLLM's manager of blocks.

    plans: of requests that are to be pruned and of those that were, by id. committed: those whose pages in front are
    null blocks; of a prompt that is stored inline they are from the start. epochs: a number for each plan.
    """

    plans: dict[str, Plan]
    committed: set[str]
    policy: InlinePolicy
    epochs: Iterator[int]

    def decide(self, request_id: str, inline: bool) -> None:
        """How a request that is about to be admitted is stored."""
        self.plans[request_id] = replace(self.plans[request_id], inline=inline)
        (self.committed.add if inline else self.committed.discard)(request_id)

    def _begins_inline(self, request_id: str) -> Plan | None:
        plan = self.plans.get(request_id)
        return plan if plan and plan.inline and not self.req_to_blocks.get(request_id) else None

    def get_num_blocks_to_allocate(self, request_id: str, *args: Any, **kwargs: Any) -> int:
        blocks = super().get_num_blocks_to_allocate(request_id, *args, **kwargs)
        plan = self._begins_inline(request_id)
        return blocks - plan.released if plan else blocks

    def allocate_new_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> list[KVCacheBlock]:
        if plan := self._begins_inline(request_id):
            self.req_to_blocks[request_id] = [self._null_block] * plan.released
        return super().allocate_new_blocks(request_id, *args, **kwargs)

    def commit(self, request_id: str, epoch: int) -> int:
        """The worker has moved the kept tokens: give up the pages in front of them. How many; others may hold them too.

        Those with a hash stay where prefix hits find them until they are needed; the others are used first. A late word
        of a request that has ended or been preempted since changes nothing: 0.
        """
        plan = self.plans.get(request_id)
        if plan is None or plan.epoch != epoch or request_id in self.committed:
            return 0
        blocks = self.req_to_blocks[request_id]
        released = [block for block in reversed(blocks[: plan.released]) if not block.is_null]
        blocks[: plan.released] = [self._null_block] * plan.released
        self.block_pool.free_blocks([block for block in released if block.block_hash is not None])
        self.block_pool.free_blocks([block for block in released if block.block_hash is None], prepend=True)
        self.committed.add(request_id)
        return len(released)

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        # What comes behind is rewritten, and must never be taken for the prompt's own.
        if plan := self.plans.get(request.request_id):
            if plan.inline:
                return
            num_tokens = min(num_tokens, plan.first)
        super().cache_blocks(request, num_tokens, *args, **kwargs)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        return 0  # no cascade attention: rows of a batch may begin with other pages

    def free(self, request_id: str) -> None:
        # Finished, aborted or preempted.
        self.plans.pop(request_id, None)
        self.committed.discard(request_id)
        self.policy.forget(request_id)
        super().free(request_id)


class PruningCacheManager(KVCacheManager):
    """vLLM's cache manager, which sees a request when it is admitted: where its plan is made."""

    tally: Tally

    @property
    def pruning(self) -> PruningManager:
        (manager,) = self.coordinator.single_type_managers
        return manager

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        plans, plan = self.pruning.plans, self.plan_of(request)
        if plan is None:
            plans.pop(request.request_id, None)
            return super().get_computed_blocks(request)
        plans[request.request_id] = replace(plan, epoch=next(self.pruning.epochs))
        if not self.enable_caching or request.skip_reading_prefix_cache or not self.pruning.policy.uses_hits(plan):
            return self.empty_kv_cache_blocks, 0
        # Pages behind the released ones are this request's own to rewrite.
        most = min(request.num_tokens - 1, plan.first)
        blocks, tokens = self.coordinator.find_longest_cache_hit(request.block_hashes, most)
        if self.log_stats and self.prefix_cache_stats is not None:
            preempted = request.num_preemptions > 0
            self.prefix_cache_stats.record(num_tokens=request.num_tokens, num_hits=tokens, preempted=preempted)
        return self.create_kv_cache_blocks(blocks), tokens

    def allocate_slots(self, request: Request, num_new_tokens: int, **kwargs: Any) -> KVCacheBlocks | None:
        return self.in_some_way(super().allocate_slots, request, num_new_tokens, **kwargs)

    def allocate_as_decided(self, request: Request, num_new_tokens: int, **kwargs: Any) -> KVCacheBlocks | None:
        """vLLM's `allocate_slots`, as `PruningManager.decide` was told."""
        return super().allocate_slots(request, num_new_tokens, **kwargs)

    def in_some_way(
        self, allocate: Callable[..., KVCacheBlocks | None], request: Request, num_new_tokens: int, **kwargs: Any
    ) -> KVCacheBlocks | None:
        """Blocks from `allocate`, which is called once for each way to store the request until there are some."""
        manager, request_id = self.pruning, request.request_id
        plan = manager.plans.get(request_id)
        if plan is None or request.num_computed_tokens:  # not pruned, or admitted before
            return allocate(request, num_new_tokens, **kwargs)
        hits = computed_before(**kwargs)
        if self.would_split(plan, num_new_tokens, hits):
            # It starts if all of it fits, whatever vLLM was told: in another step it may need fewer blocks.
            kwargs["full_sequence_must_fit"] = True
        for way in manager.policy.ways(request_id, plan, num_new_tokens, hits):
            manager.decide(request_id, way)
            blocks = allocate(request, num_new_tokens, **kwargs)
            if blocks is not None:
                return blocks
        manager.decide(request_id, TWO_PHASE)
        return None

    def would_split(self, plan: Plan, num_new_tokens: int, hits: int) -> bool:
        """Whether a step that computes so many tokens stands in the way of storing a prompt inline."""
        return not hits and num_new_tokens < plan.tokens and self.pruning.policy.possible(plan)

    def plan_of(self, request: Request) -> Plan | None:
        """Of a request that is about to be admitted; None if it is not pruned."""
        own, refusal = self._asked(request)
        return None if refusal else self._plan(request, own)

    def refusal_of(self, request: Request) -> tuple[str, str] | None:
        """Why one that would be pruned is not: the label that counts it and what to say. None: nobody refused it."""
        own, refusal = self._asked(request)
        return refusal if refusal and self._plan(request, own) else None

    def _plan(self, request: Request, own: int | None) -> Plan | None:
        manager = self.pruning
        return planning.plan(request.num_tokens, manager.block_size, manager.prune_config, own)

    def _asked(self, request: Request) -> tuple[int | None, tuple[str, str] | None]:
        """A request's own budget, and what forbids to prune it.

        One that asks for the log-probabilities of its prompt stays whole: who looks at a prompt so closely has it all.
        """
        manager, sampling = self.pruning, request.sampling_params
        try:
            own = planning.request_budget(sampling.extra_args, manager.prune_config, manager.block_size)
        except UsageError as error:
            # Judged before, unless a caller has gone past vLLM's input processor: no reason to take the engine down.
            return None, ("wrong_request", str(error))
        if sampling.prompt_logprobs is not None:
            return own, ("prompt_logprobs", "it asks for the log-probabilities of its prompt, which need all of it")
        return own, None

    def free(self, request: Request) -> None:
        # Finished, aborted or preempted; whoever never ran holds nothing.
        if request.is_finished() and request.num_computed_tokens:
            pruned = request.request_id in self.pruning.committed
            given_up = self.pruning.plans[request.request_id].first if pruned else 0
            self.tally.observe(RESIDENT_TOKENS, request.num_computed_tokens - given_up)
        super().free(request)


def computed_before(*, num_new_computed_tokens: int = 0, num_external_computed_tokens: int = 0, **_: Any) -> int:
    """Of the arguments of `allocate_slots`: tokens of a new request that are not to be computed."""
    return num_new_computed_tokens + num_external_computed_tokens


def install(manager: KVCacheManager, config: PruneConfig, tally: Tally, policy: InlinePolicy) -> PruningManager:
    """Make the managers of a scheduler prune. Raises UsageError for a cache that they cannot account for."""
    managers = manager.coordinator.single_type_managers
    if len(managers) != 1 or type(managers[0]) is not FullAttentionManager:
        kinds = ", ".join(type(each).__name__ for each in managers)
        raise UsageError(f"pruning needs one cache group of full attention and found {kinds}; use prune.enabled=false")
    single = managers[0]
    config.refuse_small_budget(single.block_size)  # of a size that vLLM has chosen since the start
    single.__class__ = PruningManager
    single.plans, single.committed, single.prune_config, single.policy = {}, set(), config, policy
    single.epochs = count()
    manager.__class__, manager.tally = PruningCacheManager, tally
    return single
