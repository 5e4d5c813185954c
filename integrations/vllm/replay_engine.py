"""A trace through a whole vLLM engine in this process, with a real model and a real worker: what a replay is held to.

Requests come when the trace says. If all come at once, no clock has a say in what is scheduled, and a replay of the
same trace must make the same steps.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.output import SchedulerOutput

from kvcompile.integrations.vllm.replay import prompt_tokens
from kvcompile.integrations.vllm.replay_outcome import Outcome, index_of
from kvcompile.integrations.vllm.schedule_queue import LengthQueue
from kvcompile.presets import NAME, compilation_config
from kvcompile.schedule.trace import Arrival, Step


@dataclass
class EngineRun:
    """What the engine did with a trace.

    tokens: output of each request. timed: each step that computed something, with the seconds from the end of the step
    before, or from when it was decided if that was later, to its own end. lost_blocks: not free with nothing to do.
    """

    outcome: Outcome
    tokens: list[list[int]]
    timed: list[tuple[Step, float]] = field(default_factory=list)
    lost_blocks: int = 0


class Engine:
    """vLLM, stock where `options` is None, else with kvcompile and these options of it.

    compilation: fields of vLLM's CompilationConfig. fields: those of LLM. RuntimeError unless
    VLLM_ENABLE_V1_MULTIPROCESSING was 0 from the start.
    """

    def __init__(
        self, model: str, *, options: dict[str, Any] | None, compilation: Mapping[str, Any] | None = None, **fields: Any
    ) -> None:
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
            raise RuntimeError("VLLM_ENABLE_V1_MULTIPROCESSING is not 0: the scheduler would be in another process")
        compiled: Any = dict(compilation or {})
        if options is not None:
            compiled, fields = compilation_config(**compiled), {**fields, "additional_config": {NAME: options}}
        llm = LLM(model=model, skip_tokenizer_init=True, disable_log_stats=False, compilation_config=compiled, **fields)
        self._engine = llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._vocabulary = llm.model_config.get_vocab_size()
        self.scheduler = self._core.scheduler
        self.asynchronous = bool(self._engine.vllm_config.scheduler_config.async_scheduling)

    def serve(self, trace: Sequence[Arrival], *, aborts: Mapping[int, int] | None = None) -> EngineRun:
        """Serve a trace, which is in the order of arrival, greedily, with nothing left in the prefix cache.

        A client whose answer has its output_tokens goes away, before max_tokens too. aborts: index of a request ->
        after which call of the engine its client goes away, whatever has become of it.
        """
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("blocks are in use though nothing runs")
        run, calls, aborts = EngineRun(Outcome.of(trace), [[] for _ in trace]), 0, aborts or {}
        begin, coming = time.perf_counter(), deque(enumerate(trace))
        with _watched(self.scheduler, run, begin):
            while coming or self._engine.has_unfinished_requests():
                while coming and coming[0][1].time_s <= time.perf_counter() - begin:
                    self._add(*coming.popleft())
                if not self._engine.has_unfinished_requests():
                    time.sleep(max(0.0, coming[0][1].time_s - (time.perf_counter() - begin)))
                    continue
                outputs = self._engine.step()
                calls += 1
                self._receive(outputs, run, time.perf_counter() - begin)
                self._abort(run, [index for index, call in aborts.items() if call == calls])
            run.outcome.seconds = time.perf_counter() - begin
            while self._core.batch_queue or self.scheduler.has_requests():  # steps that were scheduled ahead
                self._engine.step()
        pool = self.scheduler.kv_cache_manager.block_pool
        run.outcome.usable_blocks = pool.num_gpu_blocks - 1
        run.lost_blocks = run.outcome.usable_blocks - pool.get_num_free_blocks()
        if isinstance(self.scheduler.waiting, LengthQueue):  # vLLM's own queues pass nobody over
            order = self.scheduler.waiting.order
            run.outcome.most_passed, order.most_passed = order.most_passed, 0
        return run

    def shutdown(self) -> None:
        self._engine.engine_core.shutdown()

    def _add(self, index: int, arrival: Arrival) -> None:
        sampling = SamplingParams(
            temperature=0,
            max_tokens=arrival.max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = TokensPrompt(prompt_token_ids=prompt_tokens(index, arrival, self._vocabulary))
        self._engine.add_request(str(index), prompt, sampling, priority=arrival.priority)

    def _receive(self, outputs: Sequence[Any], run: EngineRun, time_s: float) -> None:
        answered = []
        for output in outputs:
            index, tokens = index_of(output.request_id), output.outputs[0].token_ids
            life = run.outcome.lives[index]
            run.tokens[index] += tokens
            answer = life.tokens + len(tokens) >= life.arrival.output_tokens
            life.received(len(tokens), time_s, ended=answer or output.finished)
            if answer and not output.finished:
                answered.append(str(index))
        self._engine.abort_request(answered)

    def _abort(self, run: EngineRun, indices: Sequence[int]) -> None:
        for index in indices:
            if run.outcome.lives[index].end_s is None:
                run.outcome.lives[index].aborted = True
                self._engine.abort_request([str(index)])


@contextmanager
def _watched(scheduler: Any, run: EngineRun, begin: float) -> Iterator[None]:
    """Count in `run` what this scheduler decides, and time its steps."""
    schedule, update, pool = scheduler.schedule, scheduler.update_from_output, scheduler.kv_cache_manager.block_pool
    decided: deque[tuple[Step, float]] = deque()
    ended = 0.0

    def watched_schedule() -> SchedulerOutput:
        output = schedule()
        decided.append((run.outcome.scheduled(output, scheduler.requests), time.perf_counter()))
        return output

    def watched_update(output: SchedulerOutput, result: Any) -> Any:
        nonlocal ended
        (step, since), before = decided.popleft(), ended
        ended = time.perf_counter()
        if output.total_num_scheduled_tokens:
            run.timed.append((step, ended - max(since, before)))
        updated = update(output, result)
        run.outcome.updated(ended - begin, pool)
        return updated

    scheduler.schedule, scheduler.update_from_output = watched_schedule, watched_update
    try:
        yield
    finally:
        del scheduler.schedule, scheduler.update_from_output
