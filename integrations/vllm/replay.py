"""Replay of a trace through a real vLLM scheduler with a simulated worker: no model, no GPU, a clock of its own.

Scheduler, KV cache manager and block pool are vLLM's (or ours on top of them); only the worker is simulated. It takes
as long as a `StepTime` says and samples made-up tokens. With asynchronous scheduling the loop is that of vLLM's
`EngineCore.step_with_batch_queue`: the next step is scheduled before the tokens of the one before are known.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvcompile.integrations.vllm.replay_outcome import Outcome
from kvcompile.integrations.vllm.schedule_queue import LengthQueue
from kvcompile.presets import NAME
from kvcompile.schedule.trace import Arrival, StepTime

BLOCK_TOKENS = 16
_STOP, _OTHER, _FIRST_PROMPT_TOKEN, _VOCABULARY = 1, 2, 3, 32000
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": _VOCABULARY,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}


def replay_config(
    *, max_model_len: int, asynchronous: bool = True, options: dict[str, Any] | None = None, **fields: Any
) -> VllmConfig:
    """vLLM's configuration for a replay; `options` are kvcompile's own and `fields` those of EngineArgs."""
    with tempfile.TemporaryDirectory() as folder:
        model = {**_MODEL, "max_position_embeddings": max_model_len}
        Path(folder, "config.json").write_text(json.dumps(model))
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            max_model_len=max_model_len,
            kv_cache_memory_bytes=1 << 20,
            block_size=BLOCK_TOKENS,
            **fields,
        ).create_engine_config()
    # Set afterwards: vLLM refuses it for the executor of its CPU build, and kvcompile's options where it is not asked
    # for. A replay has neither that executor nor anything else of kvcompile.
    config.scheduler_config.async_scheduling = asynchronous
    if options is not None:
        config.additional_config = {NAME: options}
    return config


def stock(vllm_config: VllmConfig) -> type[Scheduler]:
    """The scheduler class that vLLM itself takes."""
    return AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler


def prompt_tokens(index: int, arrival: Arrival, vocabulary: int) -> list[int]:
    """The made-up prompt of a request: no two share more than their prefix group has in common."""
    low = _FIRST_PROMPT_TOKEN
    span = vocabulary - low
    shared = [low + (arrival.prefix_group + position) % span for position in range(arrival.prefix_tokens)]
    own = arrival.prompt_tokens - arrival.prefix_tokens
    # The position's multiple of the index tells prompts apart from their first block on.
    return shared + [low + (7919 * (index + 1) + (index + 1) * position) % span for position in range(own)]


def make_scheduler(config: VllmConfig, blocks: int, make: Callable[..., Scheduler]) -> Scheduler:
    """A scheduler as vLLM's engine core makes it, over a pool of `blocks` blocks (one of which is the null block)."""
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    with set_current_vllm_config(config):
        return make(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            include_finished_set=False,
            log_stats=True,
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
        )


class Replay:
    """Drives one scheduler. `after_step(replay)` is called after every update, for checks.

    aborts: index of a request -> number of its output tokens after which its client goes away.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        config: VllmConfig,
        step_time: StepTime,
        *,
        aborts: dict[int, int] | None = None,
        after_step: Callable[[Replay], None] | None = None,
    ) -> None:
        self.scheduler, self.step_time, self.after_step = scheduler, step_time, after_step
        self.aborts = aborts or {}
        self.in_flight: deque[_InFlight] = deque()
        self.depth = 2 if config.scheduler_config.async_scheduling else 1
        self.clock_s = 0.0
        self._hasher = None
        if config.cache_config.enable_prefix_caching:
            hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
            init_none_hash(hash_function)
            self._hasher = get_request_block_hasher(BLOCK_TOKENS, hash_function)

    def run(self, trace: Sequence[Arrival]) -> Outcome:
        """Replay the whole trace, which is in the order of arrival."""
        self.outcome = Outcome.of(trace)
        coming = deque(enumerate(trace))
        while coming or self.in_flight or self.scheduler.has_requests():
            if not self.in_flight and not self.scheduler.has_unfinished_requests() and coming:
                self.clock_s = max(self.clock_s, coming[0][1].time_s)
            while coming and coming[0][1].time_s <= self.clock_s:
                self._add(*coming.popleft())
            if self.scheduler.has_requests():
                self._schedule()
                if len(self.in_flight) < self.depth and self.scheduler.has_requests() and self.in_flight[-1].tokens:
                    continue
            if self.in_flight:
                self._finish(self.in_flight.popleft())
                if self.after_step:
                    self.after_step(self)
        self.outcome.seconds = self.clock_s
        self.outcome.usable_blocks = self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
        if isinstance(self.scheduler.waiting, LengthQueue):  # vLLM's own queues pass nobody over
            self.outcome.most_passed = self.scheduler.waiting.order.most_passed
        return self.outcome

    def _add(self, index: int, arrival: Arrival) -> None:
        request = Request(
            request_id=str(index),
            prompt_token_ids=prompt_tokens(index, arrival, _VOCABULARY),
            sampling_params=SamplingParams(max_tokens=arrival.max_tokens, stop_token_ids=[_STOP], temperature=0),
            pooling_params=None,
            arrival_time=arrival.time_s,
            priority=arrival.priority,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)

    def _schedule(self) -> None:
        outcome, requests = self.outcome, self.scheduler.requests
        begin = time.thread_time()
        output = self.scheduler.schedule()
        outcome.schedule_s.append(time.thread_time() - begin)
        seconds = self.step_time.seconds(outcome.scheduled(output, requests))
        samples = [name for name in output.num_scheduled_tokens if not requests[name].is_prefill_chunk]
        self.in_flight.append(_InFlight(output, frozenset(samples), seconds))

    def _finish(self, step: _InFlight) -> None:
        scheduler, outcome = self.scheduler, self.outcome
        self.clock_s += step.seconds
        names = list(step.output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = scheduler.requests.get(name)
            if request is None or name not in step.samples:
                sampled.append([])
                continue
            last = request.num_output_tokens + 1 >= outcome.lives[int(name)].arrival.output_tokens
            sampled.append([_STOP if last else _OTHER])
        result = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=sampled
        )
        for outputs in scheduler.update_from_output(step.output, result).values():
            for output in outputs.outputs:
                self._note(int(output.request_id), len(output.new_token_ids), output.finish_reason is not None)
        outcome.updated(self.clock_s, scheduler.kv_cache_manager.block_pool)

    def _note(self, index: int, tokens: int, ended: bool) -> None:
        life = self.outcome.lives[index]
        life.received(tokens, self.clock_s, ended=ended)
        if not ended and self.aborts.get(index, life.tokens + 1) <= life.tokens:
            self.abort([index])

    def abort(self, indices: Iterable[int]) -> None:
        """The clients of these requests go away now."""
        for index in indices:
            self.outcome.lives[index].aborted = True
            self.scheduler.finish_requests(str(index), RequestStatus.FINISHED_ABORTED)


@dataclass(frozen=True)
class _InFlight:
    output: SchedulerOutput
    samples: frozenset[str]
    seconds: float

    @property
    def tokens(self) -> int:
        return self.output.total_num_scheduled_tokens
