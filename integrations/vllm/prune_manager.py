"""Block accounting of pruned requests, in vLLM's own managers: every length stays natural, and the first columns of a
pruned request's table are the null block.

Installed on the managers of a running scheduler by changing their class: they are made deep inside vLLM, and what is
added is a dictionary.
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from kvcompile.config import PruneConfig, UsageError
from kvcompile.prune import plan as planning
from kvcompile.prune.plan import Plan

logger = init_logger("vllm.kvcompile")


class PruningManager(FullAttentionManager):
    """vLLM's manager of blocks. plans: of requests that are to be pruned and of those that were, by id."""

    plans: dict[str, Plan]
    committed: set[str]

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
            num_tokens = min(num_tokens, plan.first)
        super().cache_blocks(request, num_tokens, *args, **kwargs)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        return 0  # no cascade attention: rows of a batch may begin with other pages

    def free(self, request_id: str) -> None:
        # Finished, aborted or preempted.
        self.plans.pop(request_id, None)
        self.committed.discard(request_id)
        super().free(request_id)


class PruningCacheManager(KVCacheManager):
    """vLLM's cache manager, which sees a request when it is admitted: where its plan is made."""

    @property
    def pruning(self) -> PruningManager:
        (manager,) = self.coordinator.single_type_managers
        return manager

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        plans, plan = self.pruning.plans, self.plan_of(request)
        if plan is None:
            plans.pop(request.request_id, None)
            return super().get_computed_blocks(request)
        plans[request.request_id] = plan
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self.empty_kv_cache_blocks, 0
        # Pages behind the released ones are this request's own to rewrite.
        most = min(request.num_tokens - 1, plan.first)
        blocks, tokens = self.coordinator.find_longest_cache_hit(request.block_hashes, most)
        if self.log_stats and self.prefix_cache_stats is not None:
            preempted = request.num_preemptions > 0
            self.prefix_cache_stats.record(num_tokens=request.num_tokens, num_hits=tokens, preempted=preempted)
        return self.create_kv_cache_blocks(blocks), tokens

    def plan_of(self, request: Request) -> Plan | None:
        """Of a request that is about to be admitted; None if it is not pruned.

        One that asks for the log-probabilities of its prompt stays whole: who looks at a prompt so closely has it all.
        """
        manager = self.pruning
        sampling = request.sampling_params
        if sampling is None or sampling.prompt_logprobs is not None:
            return None
        config, block_size = manager.prune_config, manager.block_size
        try:
            own = planning.request_budget(sampling.extra_args, config, block_size)
        except UsageError as error:
            # Judged before, unless a caller has gone past vLLM's input processor: no reason to take the engine down.
            logger.warning_once("a request is not pruned: %s", error)
            return None
        return planning.plan(request.num_tokens, block_size, config, request.num_preemptions, own)


def install(manager: KVCacheManager, config: PruneConfig) -> PruningManager:
    """Make the managers of a scheduler prune. Raises UsageError for a cache that they cannot account for."""
    managers = manager.coordinator.single_type_managers
    if len(managers) != 1 or type(managers[0]) is not FullAttentionManager:
        kinds = ", ".join(type(each).__name__ for each in managers)
        raise UsageError(f"pruning needs one cache group of full attention and found {kinds}; use prune.enabled=false")
    single = managers[0]
    single.__class__ = PruningManager
    single.plans, single.committed, single.prune_config = {}, set(), config
    manager.__class__ = PruningCacheManager
    return single
