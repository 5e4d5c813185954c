"""What became of the requests of a trace, in a replay or in a real engine: counted in the same way in both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvcompile.schedule.trace import Arrival, Step


@dataclass
class Life:
    """What became of one request; times in seconds of the simulated clock, or since the trace began."""

    arrival: Arrival
    first_token_s: float | None = None
    end_s: float | None = None
    tokens: int = 0
    started_step: int | None = None
    preemptions: int = 0
    aborted: bool = False
    computed_once: int = 0  # positions that have been computed at least once

    def received(self, tokens: int, time_s: float, *, ended: bool) -> None:
        """So many output tokens came at this time, the last ones if it has ended."""
        self.tokens += tokens
        if tokens and self.first_token_s is None:
            self.first_token_s = time_s
        if ended:
            self.end_s = time_s


@dataclass
class Outcome:
    """The result of serving a trace."""

    lives: list[Life]
    steps: int = 0
    seconds: float = 0.0
    preemptions: int = 0
    recomputed_tokens: int = 0
    empty_steps: int = 0  # calls of schedule() that scheduled nothing
    most_passed: int = 0  # batches that passed the same request over
    usable_blocks: int = 0
    schedule_s: list[float] = field(default_factory=list)  # processor time of each call of schedule()
    blocks_used: list[tuple[float, int]] = field(default_factory=list)  # (time, blocks in use)
    admitted: list[tuple[int, int]] = field(default_factory=list)  # (step, index of the request)
    preempted: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, trace: Sequence[Arrival]) -> Outcome:
        """Of requests that have yet to come."""
        return cls([Life(arrival) for arrival in trace])

    def scheduled(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> Step:
        """Count what a call of schedule() has decided, right after it, and give the step that it makes."""
        self.steps += 1
        self.empty_steps += not output.total_num_scheduled_tokens
        for name in output.preempted_req_ids or ():
            self.preemptions += 1
            self.preempted.append((self.steps, index_of(name)))
            self.lives[index_of(name)].preemptions += 1
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        for name in [*(new.req_id for new in output.scheduled_new_reqs), *resumed]:
            self.admitted.append((self.steps, index_of(name)))
            life = self.lives[index_of(name)]
            life.started_step = life.started_step or self.steps
        for name, count in output.num_scheduled_tokens.items():
            life, end = self.lives[index_of(name)], requests[name].num_computed_tokens
            self.recomputed_tokens += max(0, min(life.computed_once, end) - (end - count))
            life.computed_once = max(life.computed_once, end)
        return Step.of(output.num_scheduled_tokens, requests)

    def updated(self, time_s: float, pool: BlockPool) -> None:
        """A step has ended, and its tokens are known."""
        self.blocks_used.append((time_s, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()))


def index_of(name: str) -> int:
    """The index in the trace of a request that was given it as its name; an engine adds a random part behind it."""
    return int(name.partition("-")[0])
