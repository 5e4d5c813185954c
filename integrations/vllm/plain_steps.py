"""Plain decode steps, scheduled and accounted for without vLLM's work for each request.

In most steps of a server every running request takes one token, nobody comes and nobody is preempted. vLLM's
`schedule()` and `update_from_output()` then spend some 9 us on each request, most of it on asking managers for blocks
that fifteen times of sixteen nobody needs. Here such a step is told by a few comparisons and made in one loop; what it
returns and leaves behind is what vLLM's own would have. Anything else is vLLM's own: a prompt, a preemption, a request
that waits and may be admitted, structured output, log-probabilities, adapters, images, speculation, a connector.

The methods repeat what vLLM's sources say, so `compat_sources` compares those with the ones they were
written after; where they differ, or the configuration has more than this, every step is vLLM's.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop, remove_all
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from kvcompile.integrations.vllm import compat_sources

# Attribute of a SchedulerOutput that was made here: all its requests are plain.
PLAIN = "kvcompile_plain"


class _Batch(NamedTuple):
    """The running requests, all plain, and their blocks: vLLM's own lists, which grow in place."""

    requests: list[Request]
    tables: list[list[KVCacheBlock]]


class _Rows(NamedTuple):
    """The requests of a step and, of each, tokens computed before it; places in these lists of who needs a block."""

    requests: list[Request]
    computed: list[int]
    growing: list[int]


class PlainSteps(Scheduler):
    """Stands right before vLLM's class in the method resolution order. plain_steps: how many steps were made here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plain_steps = 0
        self._asynchronous = isinstance(self, AsyncScheduler)
        self._batch = _Batch([], [])
        self._single = self.kv_cache_manager.coordinator.single_type_managers[0]
        self._plain_possible = not self._beyond_plain() and compat_sources.scheduler_is_known()

    def _beyond_plain(self) -> bool:
        """Whether this engine's steps may hold what is not known here."""
        return bool(
            len(self.kv_cache_manager.coordinator.single_type_managers) != 1
            or not isinstance(self._single, FullAttentionManager)
            or self.num_spec_tokens
            or self.num_lookahead_tokens
            or self.lora_config
            or self.connector is not None
            or self.ec_connector is not None
            or self.is_encoder_decoder
            or self.use_pp
            or self.needs_kv_cache_zeroing
            or self.need_mamba_block_aligned_split
            or self.enable_return_routed_experts
            or self.enable_kv_cache_events
            or self.perf_metrics is not None
        )

    # ---- schedule()

    def schedule(self) -> SchedulerOutput:
        rows = self._plain_rows()
        if rows is None:
            self._batch = _Batch([], [])  # what it did with tables is not followed here
            return super().schedule()
        return self._schedule_plain(rows)

    def _nobody_is_admitted(self) -> bool:
        """Whether `schedule()` would admit nobody, and leave the queues as they are."""
        return not (self.waiting or self.skipped_waiting) or len(self.running) == self.max_num_running_reqs

    def _turn_away(self) -> None:
        """What is left to do with those that wait, in a step in which nobody is admitted and tokens are left."""

    def _plain_rows(self) -> _Rows | None:
        """The requests of a plain step, or None if the next one is not. Changes nothing."""
        if (
            not self._plain_possible
            or self._pause_state != PauseState.UNPAUSED
            or self._inflight_prefills
            or not self._nobody_is_admitted()
        ):
            return None
        if self.running != self._batch.requests:
            if not all(map(_is_plain, self.running)):
                return None
            tables = self._single.req_to_blocks
            self._batch = _Batch(self.running.copy(), [tables[request.request_id] for request in self.running])
        rows = _Rows([], [], [])
        scheduled, computed_of, growing = rows
        block_size, longest = self._single.block_size, self.max_model_len - 1
        for request, table in zip(*self._batch, strict=True):
            computed, ahead = request.num_computed_tokens, request.num_output_placeholders
            if ahead and computed + 2 - ahead >= request.num_prompt_tokens + request.max_tokens:
                continue  # its last token is being computed
            missing = computed + 1 - len(table) * block_size
            if len(request._all_token_ids) + ahead - computed != 1 or computed >= longest or missing > 1:
                return None
            if missing > 0:
                growing.append(len(scheduled))
            scheduled.append(request)
            computed_of.append(computed)
        fits = len(growing) <= self.kv_cache_manager.block_pool.get_num_free_blocks()
        return rows if fits and 0 < len(scheduled) <= self.max_num_scheduled_tokens else None

    def _schedule_plain(self, rows: _Rows) -> SchedulerOutput:
        requests, before, growing = rows
        ids = [request.request_id for request in requests]
        scheduled = dict.fromkeys(ids, 1)
        all_token_ids = {
            request_id: self.requests[request_id].all_token_ids.copy()
            for request_id in scheduled.keys() - self.prev_step_scheduled_req_ids
        }
        self.current_step += 1
        self.plain_steps += 1
        manager, single = self.kv_cache_manager, self._single
        manager.new_step_starts()
        new_blocks: list[tuple[list[int], ...] | None] = [None] * len(ids)
        for place in growing:
            taken = single.allocate_new_blocks(ids[place], before[place] + 1, before[place] + 1)
            new_blocks[place] = ([block.block_id for block in taken],)
        if manager.enable_caching:
            block_size = single.block_size
            for request, computed in zip(requests, before, strict=True):
                # One token more in each step: between multiples no block becomes full, and vLLM's call does nothing.
                known = min(computed + 1, len(request._all_token_ids))
                if known % block_size == 0:
                    manager.coordinator.cache_blocks(request, known)
        outputs = [len(request._output_token_ids) + request.num_output_placeholders for request in requests]
        first = self.running[0].request_id
        output = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=ids,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids=all_token_ids,
                new_block_ids=new_blocks,
                num_computed_tokens=before,
                num_output_tokens=outputs,
            ),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=len(ids),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=manager.get_num_common_prefix_blocks(first),
            preempted_req_ids=set(),
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes(),
        )
        setattr(output, PLAIN, True)
        if len(ids) < self.max_num_scheduled_tokens:
            self._turn_away()
        self.prev_step_scheduled_req_ids.clear()
        self.prev_step_scheduled_req_ids.update(ids)
        self.finished_req_ids = set()
        next_step = self.current_step + 1
        for request, computed in zip(requests, before, strict=True):
            request.num_computed_tokens = computed + 1
            request.is_prefill_chunk = False
        if self._asynchronous:
            for request in requests:
                request.num_output_placeholders += 1
                request.spec_token_ids = self._spec_token_placeholders
                if self.use_v2_model_runner:
                    request.next_decode_eligible_step = next_step
        return output

    # ---- update_from_output()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> dict[int, EngineCoreOutputs]:
        result = model_runner_output
        if (
            not getattr(scheduler_output, PLAIN, False)
            or not result.sampled_token_ids
            or result.logprobs is not None
            or result.prompt_logprobs_dict
            or result.pooler_output
            or result.num_nans_in_logits
            or result.kv_connector_output is not None
            or result.routed_experts is not None
        ):
            return super().update_from_output(scheduler_output, result)
        by_client: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        stopped_running: set[Request] = set()
        stopped_preempted: set[Request] = set()
        sampled, places, requests = result.sampled_token_ids, result.req_id_to_index, self.requests
        append = self._append
        for request_id in scheduler_output.num_scheduled_tokens:
            request = requests.get(request_id)
            if request is None or request.is_finished():
                continue  # aborted while it was computed
            status = request.status
            tokens, stopped = append(request, sampled[places[request_id]])
            if stopped:
                reason = request.get_finished_reason()
                transfer = self._free_request(request) if self._handle_stopped_request(request) else None
                (stopped_running if status == RequestStatus.RUNNING else stopped_preempted).add(request)
            elif tokens:
                reason = transfer = None
            else:
                continue
            if stopped or request.events or request.prefill_stats is not None or request.trace_headers is not None:
                output = EngineCoreOutput(
                    request_id,
                    tokens,
                    finish_reason=reason,
                    stop_reason=request.stop_reason,
                    events=request.take_events(),
                    kv_transfer_params=transfer,
                    trace_headers=request.trace_headers,
                    prefill_stats=request.take_prefill_stats(),
                    num_nans_in_logits=request.num_nans_in_logits,
                )
            else:
                output = EngineCoreOutput(request_id, tokens, num_nans_in_logits=request.num_nans_in_logits)
            by_client[request.client_index].append(output)
        if stopped_running:
            self.running = remove_all(self.running, stopped_running)
        if stopped_preempted:
            self.waiting.remove_requests(stopped_preempted)
        return self._of_clients(by_client, result.cudagraph_stats)

    def _append(self, request: Request, tokens: list[int]) -> tuple[list[int], bool]:
        """vLLM's `_update_request_with_output` for one token: what is left of it, and whether the request ends."""
        if len(tokens) != 1 or request.async_tokens_to_discard:
            return self._update_request_with_output(request, tokens) if tokens else (tokens, False)
        status, sampling, token = request.status, request.sampling_params, tokens[0]
        output, known = request._output_token_ids, request._all_token_ids
        output.append(token)
        known.append(token)
        manager = self.kv_cache_manager
        if len(known) >= (len(request.block_hashes) + 1) * manager.block_pool.hash_block_size:
            request.update_block_hashes()
        # Only these can end it; whether they do, and why, is vLLM's to say.
        stopped = (
            len(output) >= request.max_tokens
            or len(known) >= self.max_model_len
            or token == sampling.eos_token_id
            or token in (sampling.stop_token_ids or ())
            or sampling.repetition_detection is not None
        ) and check_stop(request, self.max_model_len)
        if self._asynchronous:
            request.num_output_placeholders -= 1
            if status == RequestStatus.RUNNING:
                cached = request.num_computed_tokens - request.num_output_placeholders
                if cached % self._single.block_size == 0:
                    manager.cache_blocks(request, cached)
        return tokens, stopped

    def _of_clients(
        self, by_client: dict[int, list[EngineCoreOutput]], cudagraph_stats: Any
    ) -> dict[int, EngineCoreOutputs]:
        """A step's outputs, with the requests that have ended and the statistics of the step."""
        outputs = {client: EngineCoreOutputs(outputs=own) for client, own in by_client.items()}
        if ended := self.finished_req_ids_dict:
            for client, ids in ended.items():
                outputs.setdefault(client, EngineCoreOutputs()).finished_requests = ids
            ended.clear()
        if (stats := self.make_stats(None, None, cudagraph_stats, None)) is not None:
            if not outputs:
                outputs[0] = EngineCoreOutputs()
            next(iter(outputs.values())).scheduler_stats = stats
        return outputs


def _is_plain(request: Request) -> bool:
    """Whether a running request needs nothing but its next token. So it stays as long as it runs."""
    return not (
        request.structured_output_request is not None
        or request.mm_features
        or request.lora_request is not None
        or request.pooling_params is not None
        or request.resumable
        or request.spec_token_ids
    )
