"""The scheduler's hooks of offload: save a request before its blocks are given up, back up those that may be next.

_preempt_request()         what is not on the host yet is pinned and copied; the rest is free at once
_build_kv_connector_meta() when few blocks are free: copies ahead of need, of pages that no step can change any more;
                           when there are enough: of what has ended, for requests that begin alike
schedule()                 the victim is one that gives a block at once, if there is one: else vLLM would take a second;
                           who is back and keeps the only one that could run from its blocks gives them up again
update_from_output()       requests whose pages did not come back are computed again
_free_request()            who ends while it is loaded is gone at once; its blocks are set aside until they have come
reset_prefix_cache()       with it go all copies; what is being loaded is not used, and blocks under way are set aside
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from kvcompile.config import OffloadConfig
from kvcompile.integrations.vllm import offload_manager
from kvcompile.integrations.vllm.metrics_scheduler import Counting
from kvcompile.integrations.vllm.offload_connector import KVCompileOffload
from kvcompile.integrations.vllm.offload_control import Load
from kvcompile.integrations.vllm.offload_metrics import Sent
from kvcompile.offload import backup
from kvcompile.offload.backup import Candidate
from kvcompile.offload.books import Life
from kvcompile.offload.counters import Reason
from kvcompile.presets import NAME

# Copied ahead of need in one step, at most: 0.7 ms at 50 GB/s, less than a step of any model takes on a device; of a
# CPU, which sums it up too, about 10 ms.
BACKUP_BYTES = 32 << 20


class Offloading(Counting):
    """Stands before a scheduler class, and before `Pruning`, in the method resolution order."""

    connector: KVCompileOffload
    orders_victims = False  # whether the class behind has them last by itself

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._offload_config = OffloadConfig(**self.vllm_config.additional_config[NAME]["offload"])
        self.offload = self.connector.control
        offload_manager.install(self.kv_cache_manager, self.offload)
        self._backup_pages = max(1, BACKUP_BYTES // self.offload.counters.page_bytes)
        self._resetting = False
        self._sent = Sent(self.offload.counters)

    def on_release(self) -> None:
        """Blocks have come back that no request gave up just now."""

    def likely_victims(self) -> Iterable[Request]:
        """The running requests, the next to be preempted first."""
        if self.policy == SchedulingPolicy.PRIORITY:
            return sorted(self.running, key=lambda request: (request.priority, request.arrival_time), reverse=True)
        return sorted(reversed(self.running), key=self.gives_a_block, reverse=True)

    def gives_a_block(self, request: Request) -> bool:
        """Whether preempting it frees one in the same step: a block that has no copy yet is held until it has one."""
        blocks = self.kv_cache_manager.get_blocks(request.request_id).blocks[0]
        pages = self.offload.books.copied_pages(request.request_id)
        return any(blocks[page].ref_cnt == 1 for page in reversed(pages))  # what requests share are their first pages

    def schedule(self) -> SchedulerOutput:
        for load in self.offload.overdue():
            self._go_on_without(load)
        output = self._schedule()
        if not (output.num_scheduled_tokens or self.running or self.offload.transfers.waiting):
            self._make_way()
        return output

    def _schedule(self) -> SchedulerOutput:
        """vLLM's own, with the victims last: it takes the last one, and a further one if that has freed nothing."""
        enough = self.kv_cache_manager.block_pool.get_num_free_blocks() >= self._most_blocks()
        if enough or self.orders_victims or self.policy == SchedulingPolicy.PRIORITY:
            return super().schedule()
        order = {request: place for place, request in enumerate(self.running)}
        self.running = list(self.likely_victims())[::-1]
        output = super().schedule()
        self.running.sort(key=lambda request: order.get(request, len(order)))
        return output

    def _most_blocks(self) -> int:
        """That a step can take, at most."""
        return len(self.running) + self.max_num_scheduled_tokens // self.block_size

    def _make_way(self) -> None:
        """For the first who waits, if nobody can run: vLLM looks no further than at one for whom blocks are too few.

        By priority, or as its own copies were not ready yet, it stands before others that are back and hold blocks.
        """
        for request in (*self.waiting, *self.skipped_waiting):
            if self.kv_cache_manager.get_blocks(request.request_id).blocks[0] and self._is_back(request):
                if request.num_computed_tokens and request.num_preemptions:
                    self._save(request)  # the others hold what the host has for anybody
                self._give_back(request)
        self.on_release()

    def _build_kv_connector_meta(self, connector: Any, scheduler_output: SchedulerOutput) -> Any:
        pool = self.kv_cache_manager.block_pool
        enough = self._offload_config.lazy_gpu_free_trigger * (pool.num_gpu_blocks - 1)
        if (free := pool.get_num_free_blocks()) >= enough:
            if not self.offload.why_off:  # and what is copied is held for a step or two
                spare = int(free - max(enough, self._most_blocks()))
                self.offload.prefix.copy_ended(min(self._backup_pages, spare))
        else:
            # What was found in the prefix cache by those that begin now may be computed in this very step.
            begin = {new.req_id for new in scheduler_output.scheduled_new_reqs}
            self._back_up(begin | scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        return super()._build_kv_connector_meta(connector, scheduler_output)

    def _back_up(self, but_for: set[str]) -> None:
        if self.offload.why_off:
            return
        books, most_requests = self.offload.books, self._offload_config.max_scan_reqs
        for request_id, page in backup.plan(self._candidates(but_for), books, most_requests, self._backup_pages):
            blocks = self.kv_cache_manager.get_blocks(request_id).blocks[0]
            self.offload.back_up(request_id, page, blocks[page])

    def _candidates(self, but_for: set[str]) -> Iterator[Candidate]:
        """The likeliest victims first."""
        for request in self.likely_victims():
            life = self._life(request)
            if isinstance(life, Life) and request.request_id not in but_for:
                self.offload.books.reshape(request.request_id, life.shape)  # what is copied of another counts no more
                yield Candidate(request.request_id, range(life.first, life.tokens // self.block_size))

    def _life(self, request: Request) -> Life | Reason:
        """What a running request holds that is computed, or why it cannot be saved.

        A step that is in flight counts: it ends before anything that is ordered now.
        """
        tokens, null_pages, shape = request.num_computed_tokens, 0, None
        if request.resumable or (request.skip_reading_prefix_cache and tokens < request.num_prompt_tokens):
            return Reason.UNSUPPORTED
        pruning = getattr(self, "pruning", None)
        if pruning is not None and (plan := pruning.plans.get(request.request_id)):
            committed = request.request_id in pruning.committed
            # In flight or still to come is what may move its tokens.
            if tokens < plan.tokens or (tokens == plan.tokens and request.num_output_placeholders):
                return Reason.PRUNE_PENDING
            null_pages, shape = plan.released if committed else 0, (plan, committed)
        return Life(tokens, null_pages, shape)

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        self._save(request)
        super()._preempt_request(request, timestamp)

    def _save(self, request: Request) -> None:
        """It gives up its blocks next."""
        life = Reason.RESET if self._resetting else self._life(request)
        blocks = self.kv_cache_manager.get_blocks(request.request_id).blocks[0]
        if isinstance(life, Life):
            self.offload.preempted(request.request_id, life, blocks)
        else:
            self.offload.give_up(request.request_id, life, sum(not block.is_null for block in blocks))

    def count(self) -> None:
        super().count()
        self._sent.to(self.tally)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        self.offload.transfers.step_ended()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        failed, self.connector.failed = self.connector.failed, []
        for load in failed:
            self._compute_again(load.request)
        if self.connector.released:
            self.connector.released = 0
            self.on_release()
        return outputs

    def _compute_again(self, request: Request) -> None:
        """vLLM frees what it holds when it looks at it next, and begins anew."""
        request.num_computed_tokens = 0
        self._inflight_prefills.discard(request)  # no blocks are kept free for it until it begins
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            self.failed_recving_kv_req_ids.add(request.request_id)

    def _go_on_without(self, load: Load) -> None:
        """Its blocks are set aside."""
        self.finished_recving_kv_req_ids.add(load.request.request_id)
        self._compute_again(load.request)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        # vLLM would have it wait for its load, and another of the same id would then end the engine.
        if delay_free_blocks:
            for load in self.offload.transfers.loads.values():
                if load.request is request:
                    self.offload.transfers.set_aside(load)
        return super()._free_request(request)

    def has_finished_requests(self) -> bool:
        # An answer that frees blocks comes with a step only.
        return super().has_finished_requests() or self.offload.transfers.waiting

    def reset_prefix_cache(self, reset_running_requests: bool = False, *args: Any, **kwargs: Any) -> bool:
        """Nothing on the host is used any more, whether or not the device's cache can be reset.

        With reset_running_requests it can (but, as in vLLM, not while a streaming session waits for its next input):
        vLLM raises RuntimeError where a request is being loaded, here it is computed again at once, and blocks that
        copies still read or write stay out of the pool until they have ended.
        Without, it is False as long as any request holds blocks, one that is being loaded too: that is computed again.
        """
        self.offload.forget_all()
        if reset_running_requests:
            for load in list(self.offload.transfers.loads.values()):
                if self.offload.transfers.set_aside(load):
                    self._go_on_without(load)
            for request in (*self.waiting, *self.skipped_waiting):
                if self._is_back(request):  # what it holds is not valid any more
                    self._give_back(request)
        self._resetting = True
        try:
            return super().reset_prefix_cache(reset_running_requests, *args, **kwargs)
        finally:
            self._resetting = False

    def _is_back(self, request: Request) -> bool:
        """Of one that waits: whether what it was loaded has come, well or not. Whoever waits for nothing counts too."""
        waits_for_nothing = request.status in (RequestStatus.PREEMPTED, RequestStatus.WAITING)
        return waits_for_nothing or request.request_id in self.finished_recving_kv_req_ids

    def _give_back(self, request: Request) -> None:
        """All that it holds; it comes back anew."""
        self.kv_cache_manager.free(request)
        self._compute_again(request)
