"""The schedulers that `kvcompile bench schedule` compares, by the names of benchmark records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from kvcompile.config import SchedulerConfig
from kvcompile.integrations.vllm.replay import Replay, make_scheduler, replay_config
from kvcompile.integrations.vllm.replay_outcome import Outcome
from kvcompile.integrations.vllm.scheduler import make_scheduler as length_aware
from kvcompile.schedule.trace import Arrival, StepTime
from kvcompile.schedule.victims import Stake, keep_order


class _LeastComputed(Scheduler):
    """vLLM's scheduler with nothing changed but whom it preempts: the one with the fewest computed tokens."""

    def schedule(self) -> SchedulerOutput:
        if self.kv_cache_manager.block_pool.get_num_free_blocks() < len(self.running) + len(self._inflight_prefills):
            self.running = keep_order(self.running, lambda r: Stake(0, r.num_computed_tokens, r.arrival_time))
        return super().schedule()


class _LeastComputedAsync(_LeastComputed, AsyncScheduler):
    """The same where steps are scheduled ahead."""


SYSTEMS = {
    "vllm-fcfs": (Scheduler, AsyncScheduler),
    "vllm-least-computed": (_LeastComputed, _LeastComputedAsync),
    "kvcompile": (length_aware, length_aware),
}


def scheduler_for(system: str, blocks: int, *, asynchronous: bool, **fields: Any) -> tuple[Scheduler, Any]:
    """A scheduler of this system over so many blocks, and the configuration that it is of."""
    config = replay_config(asynchronous=asynchronous, options={"scheduler": asdict(SchedulerConfig())}, **fields)
    return make_scheduler(config, blocks, SYSTEMS[system][asynchronous]), config


def replay(
    system: str, trace: Sequence[Arrival], blocks: int, step_time: StepTime, *, asynchronous: bool, **fields: Any
) -> Outcome:
    """The outcome of a whole trace. `fields` are those of EngineArgs."""
    scheduler, config = scheduler_for(system, blocks, asynchronous=asynchronous, **fields)
    return Replay(scheduler, config, step_time).run(trace)
