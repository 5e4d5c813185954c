"""The KV-length-aware scheduler: vLLM's own, with another order of waiting requests, admission that looks ahead, and
victims that waste the least work.

vLLM's `schedule()` runs as it is. What is changed are its inputs: the queue it takes waiting requests from, the order
of its running requests when one must be preempted, and whether a waiting request may have its blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.request import Request

from kvcompile.config import SchedulerConfig
from kvcompile.integrations.vllm.plain_steps import PlainSteps
from kvcompile.integrations.vllm.schedule_queue import LengthQueue
from kvcompile.presets import NAME
from kvcompile.schedule.block_demand import BlockDemand, Holding
from kvcompile.schedule.victims import Stake, keep_order
from kvcompile.schedule.waiting import WaitingOrder


class _AdmittingManager:
    """vLLM's KV cache manager with another `allocate_slots`, for the part of a step in which requests are admitted.

    An object of its own: an attribute set on vLLM's would slow every access to it, in the other part too.
    """

    def __init__(self, manager: KVCacheManager, allocate_slots: Callable[..., KVCacheBlocks | None]) -> None:
        self._manager, self.allocate_slots = manager, allocate_slots

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class LengthAware(PlainSteps):
    """Stands before vLLM's class in the method resolution order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = SchedulerConfig(**self.vllm_config.additional_config[NAME]["scheduler"])
        self._manager = self.kv_cache_manager
        self._admitting = _AdmittingManager(self._manager, self._admit)
        pool = self._manager.block_pool
        self._usable_blocks = pool.num_gpu_blocks - 1  # one is the null block
        self._reserve_blocks = int(options.reserve_ratio * self._usable_blocks)
        self._horizon = options.horizon_steps
        self._release_steps = 2 if self.scheduler_config.async_scheduling else 1
        order = WaitingOrder(
            max_tokens=self.max_model_len,
            leaf_tokens=self.block_size,
            places=self.max_num_running_reqs,
            blocks=self._usable_blocks,
            max_passed=options.max_wait_batches,
            hits=self._prefix_hits,
        )
        self._by_priority = self.policy == SchedulingPolicy.PRIORITY
        self.waiting = LengthQueue(order, self.block_size, self._resident_tokens, by_priority=self._by_priority)
        # Priority is in our own orders. Told so, vLLM would look for victims itself, by priority and arrival alone.
        self.policy = SchedulingPolicy.FCFS
        self._demand: BlockDemand | None = None
        self._refused: Request | None = None  # who was refused last, and until when that needs no second look
        self._ask_again_step = 0

    def schedule(self) -> SchedulerOutput:
        self._demand = None
        if self.finished_req_ids or self.current_step >= self._ask_again_step:
            self._refused = None
        if self._manager.block_pool.get_num_free_blocks() < self._most_blocks_of_a_step():
            self.running = keep_order(self.running, self._stake)
        try:
            output = super().schedule()
        finally:
            self.kv_cache_manager = self._manager
        if output.preempted_req_ids:
            self._refused = None
        return output

    def _most_blocks_of_a_step(self) -> int:
        """Blocks that the running requests can take in one step, at most: one to decode, a chunk's to prefill."""
        chunks = sum(request.num_tokens - request.num_computed_tokens for request in self._inflight_prefills)
        return len(self.running) + min(chunks, self.max_num_scheduled_tokens) // self.block_size

    def _nobody_is_admitted(self) -> bool:
        return super()._nobody_is_admitted() or self._is_refused_again()

    def _is_refused_again(self) -> bool:
        """Whether somebody waits, and the first in line is who was refused, for whom nothing has changed since."""
        refused = self._refused
        return (
            refused is not None
            and not self.skipped_waiting
            and not refused.num_computed_tokens
            and bool(self.waiting)
            and self.waiting.peek_request() is refused
        )

    def _turn_away(self) -> None:
        if len(self.running) < self.max_num_running_reqs and self._is_refused_again():
            # vLLM looks for its prefix, and counts that, before it asks for its blocks.
            _, hits = self._manager.get_computed_blocks(self._refused)
            if self._refused.prefill_stats is not None:
                self._refused.prefill_stats.set(
                    num_prompt_tokens=self._refused.num_prompt_tokens,
                    num_local_cached_tokens=hits,
                    num_external_cached_tokens=0,
                )

    def _select_waiting_queue_for_scheduling(self) -> RequestQueue | None:
        # Called for waiting requests only: what is allocated from here on is an admission.
        self.kv_cache_manager = self._admitting
        if self._by_priority and self.waiting and self.skipped_waiting:
            waiting, skipped = self.waiting.peek_request(), self.skipped_waiting.peek_request()
            return self.waiting if waiting < skipped else self.skipped_waiting
        return super()._select_waiting_queue_for_scheduling()

    def _admit(self, request: Request, num_new_tokens: int, **kwargs: Any) -> KVCacheBlocks | None:
        """vLLM's `allocate_slots`, refusing what would be preempted, or have another preempted, within the horizon."""
        return None if request is self._refused else self._allocate_if_it_lasts(request, num_new_tokens, **kwargs)

    def _allocate_if_it_lasts(self, request: Request, num_new_tokens: int, **kwargs: Any) -> KVCacheBlocks | None:
        pool = self._manager.block_pool
        holding = self._holding_of_new(request, num_new_tokens, **kwargs)
        free = pool.get_num_free_blocks()
        # Alone, a request has the whole pool, and vLLM does not start with a pool that is too small for one.
        if self.running and not self._lasts(holding, free - self._reserve_blocks):
            # Until blocks are given back that can hardly change: what runs and is not pruned only takes more.
            self._refused, self._ask_again_step = request, self.current_step + self.block_size
            return None
        blocks = self._allocate(request, num_new_tokens, **kwargs)
        if kwargs.get("num_new_computed_tokens"):
            self._demand = None  # blocks of others may be shared now, and are not given back when those end
        elif blocks is not None and self._demand is not None:
            self._demand.add(holding._replace(missing=holding.missing - (free - pool.get_num_free_blocks())))
        return blocks

    def _allocate(self, request: Request, num_new_tokens: int, **kwargs: Any) -> KVCacheBlocks | None:
        return self._manager.allocate_slots(request, num_new_tokens, **kwargs)

    def _lasts(self, holding: Holding, free: int) -> bool:
        """Whether so many free blocks are enough for this request and all that run, over the whole horizon."""
        if self._demand is None:
            # With blocks in plenty there is no need to look closer: nobody takes more than these.
            most = (len(self.running) + 1) * -(-self._horizon // self.block_size)
            if holding.missing + sum(map(self._missing, self._inflight_prefills)) + most <= free:
                return True
            self._demand = self._demand_of_running()
        return self._demand.peak_with(holding) <= free

    def _missing(self, request: Request) -> int:
        """Blocks of a prompt in progress that are not allocated yet."""
        held = self._manager.get_blocks(request.request_id).blocks[0]
        return max(0, -(-request.num_tokens // self.block_size) - len(held))

    def _holding_of_new(
        self,
        request: Request,
        num_new_tokens: int,
        *,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_new_computed_tokens: int = 0,
        **_: Any,
    ) -> Holding:
        manager = self._manager
        cached = new_computed_blocks or manager.empty_kv_cache_blocks
        tokens = min(request.num_tokens, self.max_model_len)
        missing = manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=tokens,
            new_computed_blocks=cached.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=request.num_computed_tokens + num_new_computed_tokens,
            num_tokens_main_model=tokens,
            apply_admission_cap=True,
        )
        computed = request.num_computed_tokens + num_new_computed_tokens + num_new_tokens
        returned = None if computed < tokens else 0
        return Holding(tokens, -(-tokens // self.block_size), missing, self._left(request), returned)

    def _left(self, request: Request) -> int:
        ends = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        return max(0, ends - request.num_tokens - request.num_output_placeholders)

    def _demand_of_running(self) -> BlockDemand:
        demand = BlockDemand(self._horizon, self.block_size, self._release_steps)
        fill, prefills, beyond = [0] * self.block_size, self._inflight_prefills, self._horizon + self._release_steps
        for request in self.running:
            tokens = request.num_tokens + request.num_output_placeholders
            if tokens <= request.num_computed_tokens:  # its token of this step comes on top
                tokens = request.num_computed_tokens + 1
            last = tokens + beyond
            goes_on = last < request.num_prompt_tokens + request.max_tokens and last < self.max_model_len
            if goes_on and request not in prefills:
                fill[tokens % self.block_size] += 1
            else:
                demand.add(self._holding_of(request, tokens))
        demand.add_lasting(fill)
        return demand

    def _holding_of(self, request: Request, tokens: int) -> Holding:
        """Of a running request whose prompt is in progress, or which may end within the horizon."""
        blocks, left = -(-tokens // self.block_size), self._left(request)
        if request in self._inflight_prefills:
            return Holding(tokens, blocks, self._missing(request), left, returned=None)
        held = self._manager.get_blocks(request.request_id).blocks[0]
        returned = sum(block.ref_cnt == 1 and not block.is_null for block in held)
        return Holding(tokens, blocks, 0, left, returned)

    def _stake(self, request: Request) -> Stake:
        return Stake(request.priority if self._by_priority else 0, request.num_computed_tokens, request.arrival_time)

    def _resident_tokens(self, request: Request) -> int:
        """Tokens of KV that a waiting request will hold once its prompt is computed."""
        return request.num_tokens

    def _prefix_hits(self, request: Request) -> int:
        if not self._manager.enable_caching or request.skip_reading_prefix_cache:
            return 0
        found = self._manager.coordinator.find_longest_cache_hit(request.block_hashes, self._most_hits(request))
        return found[1]

    def _most_hits(self, request: Request) -> int:
        return request.num_tokens - 1
