"""Offload in the KV-length-aware scheduler: who has copies on the host is preempted first, and whoever is back runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from kvcompile.integrations.vllm.length_aware import LengthAware
from kvcompile.integrations.vllm.offload_scheduler import Offloading
from kvcompile.offload.books import Life
from kvcompile.schedule.victims import Stake, keep_order


class OffloadingLengthAware(Offloading, LengthAware):
    """Stands before a length-aware scheduler's class in the method resolution order."""

    orders_victims = True

    def on_release(self) -> None:
        self._refused = None

    def likely_victims(self) -> Iterable[Request]:
        return reversed(keep_order(self.running, self._stake))

    def _stake(self, request: Request) -> Stake:
        stake, life = super()._stake(request), self._life(request)
        if self.offload.why_off or not isinstance(life, Life):
            return stake  # all of it would be lost
        kept = life.first + self.offload.books.copied(request.request_id)  # pages: null ones need no copy
        return stake._replace(lost_tokens=max(0, life.tokens - kept * self.block_size))

    def _admit(self, request: Request, num_new_tokens: int, **kwargs: Any) -> KVCacheBlocks | None:
        if request.num_computed_tokens:  # its pages have come: refused now, it would hold them for nothing
            return self._manager.allocate_slots(request, num_new_tokens, **kwargs)
        return super()._admit(request, num_new_tokens, **kwargs)


def offloading(kind: type[Scheduler]) -> type[Scheduler]:
    """A scheduler class, and its requests saved when they are preempted."""
    mixin = OffloadingLengthAware if issubclass(kind, LengthAware) else Offloading
    return type(f"Offloading{kind.__name__}", (mixin, kind), {})
