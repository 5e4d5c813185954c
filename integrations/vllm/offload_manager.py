"""vLLM's block managers for a pruned request that is restored: its table begins with null blocks, as it did.

vLLM allocates a whole table for tokens that come from outside; that the first ones have no pages is what its managers
of sliding windows call skipped tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from kvcompile.config import UsageError
from kvcompile.integrations.vllm.offload_control import OffloadControl
from kvcompile.prune.plan import Plan


class RestoringManager(FullAttentionManager):
    """Stands before a manager's class in the method resolution order."""

    offload: OffloadControl
    _skipped = 0

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return self._skipped or super().get_num_skipped_tokens(num_computed_tokens)

    def get_num_blocks_to_allocate(self, request_id: str, *args: Any, **kwargs: Any) -> int:
        with_skipped = super().get_num_blocks_to_allocate
        return self._as_pruned(request_id, lambda: with_skipped(request_id, *args, **kwargs))

    def allocate_new_computed_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        with_skipped = super().allocate_new_computed_blocks
        self._as_pruned(request_id, lambda: with_skipped(request_id, *args, **kwargs))

    def commit(self, request_id: str, epoch: int) -> int:
        """Of a manager that prunes: what is given up in front was not rewritten, and is a prefix to others."""
        blocks = list(self.req_to_blocks.get(request_id, ()))
        released = super().commit(request_id, epoch)
        self.offload.prefix.ended(blocks[: self.plans[request_id].released] if released else ())
        return released

    def _as_pruned(self, request_id: str, work: Callable[[], Any]) -> Any:
        self._skipped = self.offload.null_pages(request_id) * self.block_size
        try:
            return work()
        finally:
            self._skipped = 0


class RestoringCacheManager(KVCacheManager):
    """Stands before a cache manager's class in the method resolution order."""

    offload: OffloadControl

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        (single,) = self.coordinator.single_type_managers
        life = self.offload.books.life(request.request_id)
        if life is None or not hasattr(single, "plans"):
            return super().get_computed_blocks(request)
        # Pruned before or not, it stays as it was: no plan is made anew.
        if life.shape is None:
            found = KVCacheManager.get_computed_blocks(self, request)
        else:
            found = self.empty_kv_cache_blocks, 0  # all of it is on the host
        self.offload.can_restore(request.request_id, life, found[1])
        if self.offload.books.life(request.request_id) is None:  # it cannot be restored
            return super().get_computed_blocks(request)
        single.plans.pop(request.request_id, None)
        return found

    def reset_prefix_cache(self) -> bool:
        """Blocks that only copies hold are no reason not to: what is being copied is not used any more."""
        with self.offload.transfers.lent():
            return super().reset_prefix_cache()


def install(manager: KVCacheManager, offload: OffloadControl) -> None:
    """Raises UsageError for a cache that a host copy cannot be made of."""
    managers = manager.coordinator.single_type_managers
    if len(managers) != 1 or not isinstance(managers[0], FullAttentionManager):
        kinds = ", ".join(type(each).__name__ for each in managers)
        raise UsageError(f"offload needs one cache group of full attention, found {kinds}; use offload.enabled=false")
    (single,) = managers
    for each, kind in ((single, RestoringManager), (manager, RestoringCacheManager)):
        each.__class__ = type(f"{kind.__name__}Of{type(each).__name__}", (kind, type(each)), {})
        each.offload = offload

    def take_back(request_id: str, shape: tuple[Plan, bool]) -> None:
        plan, committed = shape
        single.plans[request_id] = plan
        if committed:
            single.committed.add(request_id)

    def most_hits(request: Request) -> int:
        """As on the device: the last token is always computed, and what is rewritten is nobody else's."""
        if not manager.enable_caching or request.skip_reading_prefix_cache or request.resumable:
            return 0
        most, plan = request.num_tokens - 1, getattr(single, "plans", {}).get(request.request_id)
        if plan is None:
            return most
        return min(most, plan.first) if single.policy.uses_hits(plan) else 0

    offload.take_back, offload.prefix.most_hits = take_back, most_hits
