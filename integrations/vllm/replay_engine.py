"""A trace through a whole vLLM engine in this process, with real weights and a real worker: what a replay is held to.

All requests arrive at once, so that no clock has a say in what is scheduled: with synchronous scheduling a replay of
the same trace must make the same steps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.v1.core.sched.output import SchedulerOutput

from kvcompile.integrations.vllm.replay import prompt_tokens
from kvcompile.presets import NAME
from kvcompile.schedule.trace import Arrival, Step


@dataclass
class EngineRun:
    """What the engine did: output tokens of each request, and each step with the seconds that it took."""

    tokens: list[list[int]] = field(default_factory=list)
    preemptions: int = 0
    steps: list[tuple[Step, float]] = field(default_factory=list)


def run_engine(model: str, trace: Sequence[Arrival], *, options: dict[str, Any] | None, **fields: Any) -> EngineRun:
    """Serve the trace greedily, every request to its output_tokens. `options` are kvcompile's; None is stock vLLM.

    `fields` are those of LLM. RuntimeError unless VLLM_ENABLE_V1_MULTIPROCESSING was 0 from the start.
    """
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        raise RuntimeError("VLLM_ENABLE_V1_MULTIPROCESSING is not 0: the scheduler would be in another process")
    asked = {} if options is None else {"compilation_config": NAME, "additional_config": {NAME: options}}
    llm = LLM(model=model, skip_tokenizer_init=True, enforce_eager=True, disable_log_stats=False, **asked, **fields)
    run = EngineRun()
    _watch(llm.llm_engine.engine_core.engine_core.scheduler, run)
    limit = llm.model_config.get_vocab_size()
    prompts = [TokensPrompt(prompt_token_ids=prompt_tokens(i, a, limit)) for i, a in enumerate(trace)]
    sampling = [
        SamplingParams(temperature=0, max_tokens=a.output_tokens, ignore_eos=True, detokenize=False) for a in trace
    ]
    answers = llm.generate(prompts, sampling, use_tqdm=False)
    run.tokens = [list(answer.outputs[0].token_ids) for answer in answers]
    llm.llm_engine.engine_core.shutdown()
    return run


def _watch(scheduler: Any, run: EngineRun) -> None:
    """Record every step of this scheduler, from when it was decided until its tokens came back."""
    schedule, update = scheduler.schedule, scheduler.update_from_output
    begun: list[float] = []

    def watched_schedule() -> SchedulerOutput:
        output = schedule()
        run.preemptions += len(output.preempted_req_ids or ())
        begun.append(time.perf_counter())
        return output

    def watched_update(output: SchedulerOutput, result: Any) -> Any:
        seconds = time.perf_counter() - begun.pop(0)
        if output.total_num_scheduled_tokens:
            run.steps.append((Step.of(output.num_scheduled_tokens, scheduler.requests), seconds))
        return update(output, result)

    scheduler.schedule, scheduler.update_from_output = watched_schedule, watched_update
