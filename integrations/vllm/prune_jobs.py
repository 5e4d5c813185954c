"""The worker's half of pruning: what layers note of a prompt while they compute it, and the move at its end.

Every layer scores during the forward pass. Tokens are chosen for layers together, which takes a GPU little longer than
for one. Only when all layers have chosen, kept tokens are moved, as a rewrite in place cannot be undone half-way; then
the worker's own table row gets its null blocks, and the request is acknowledged.

A prompt that is stored inline is in no cache: each layer scores it from a cache made for the length of the call, and
stores what is kept where it belongs. There is no way back, so where scores fail that layer keeps the last tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from vllm.logger import init_logger

from kvcompile.integrations.vllm.prune_scheduler import Step
from kvcompile.ops.prune import prune_copy
from kvcompile.prune.plan import Plan

logger = init_logger("vllm.kvcompile")

# (layer, queries [W, H, d], cache, table row int32 [columns], tokens, scale) -> scores of the layer
Score = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor, int, float], torch.Tensor]
# (scores of some layers, kept) -> int32 [G, kept] of each, ascending
Choose = Callable[[list[torch.Tensor], int], list[torch.Tensor]]
# (cache, table row, kept tokens) of each layer, and the plan: the kept tokens to where they belong
Move = Callable[[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], Plan], None]
# What is so on this rank -> what is so on all of them: see `prune_ranks.py`
Agree = Callable[[list[bool]], list[bool]]

MOST_WAITING_BYTES = 64 << 20  # of scores that wait for those of other layers, of all prompts that end in a step


@dataclass
class Job:
    """One request from the first chunk that touches the observation window to the end of its prompt."""

    plan: Plan
    window: int
    score: Score
    choose: Choose
    final: bool = False
    most_waiting_bytes: int = 0  # of `scored`: this prompt's part of `MOST_WAITING_BYTES`
    queries: dict[str, torch.Tensor] = field(default_factory=dict)
    scored: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    keeps: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    stored: set[str] = field(default_factory=set)
    failures: dict[type[Exception], str] = field(default_factory=dict)

    def observe(
        self, layer: str, query: torch.Tensor, kv_cache: torch.Tensor, table_row: torch.Tensor, scale: float
    ) -> None:
        """Of the request's new tokens in one layer: query [T, H, d], their keys and values are in the cache."""
        earlier = self.queries.pop(layer, None)
        last = (query if earlier is None else torch.cat([earlier, query]))[-self.window :]
        if not self.final:
            self.queries[layer] = last.clone()
            return
        with self._failing():
            scores = self.score(layer, last, kv_cache, table_row, self.plan.tokens, scale)
            self.scored[layer] = kv_cache, table_row, scores
            if sum(waiting.nbytes for _, _, waiting in self.scored.values()) > self.most_waiting_bytes:
                self.choose_scored()

    def choose_scored(self) -> None:
        """What the layers that have scored and not chosen keep."""
        scored, self.scored = self.scored, {}
        if not scored:
            return
        with self._failing():
            keeps = self.choose([scores for _, _, scores in scored.values()], self.plan.kept)
            for (layer, (kv_cache, table_row, _)), keep in zip(scored.items(), keeps, strict=True):
                self.keeps[layer] = kv_cache, table_row, keep

    def store(
        self,
        layer: str,
        query: torch.Tensor,
        prompt_cache: torch.Tensor,
        prompt_row: torch.Tensor,
        kv_cache: torch.Tensor,
        table_row: torch.Tensor,
        scale: float,
    ) -> None:
        """Of a prompt that is stored inline, in one layer: its kept tokens from a cache of its own to `kv_cache`.

        query [T, H, d]; prompt_cache, prompt_row: as `pages_of` makes them of its keys and values; table_row: int32
        [columns], of which the released ones are not read.
        """
        plan, keep = self.plan, None
        with self._failing():
            scores = self.score(layer, query[-self.window :], prompt_cache, prompt_row, plan.tokens, scale)
            (keep,) = self.choose([scores], plan.kept)
        if keep is None:
            last = torch.arange(plan.first, plan.tokens, dtype=torch.int32, device=kv_cache.device)
            keep = last.repeat(kv_cache.shape[3], 1)
        prune_copy(prompt_cache, prompt_row, kv_cache, table_row, keep, plan.first)
        self.stored.add(layer)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Of scores or a choice an error is noted and not raised."""
        try:
            yield
        except (RuntimeError, ValueError) as error:  # memory on a device; what an operator refuses
            self.failures[type(error)] = str(error)


class Jobs:
    """All jobs of a worker."""

    def __init__(
        self,
        window: int,
        layers: int,
        score: Score,
        choose: Choose,
        move: Move,
        agree: Agree = list,
    ) -> None:
        self._window, self._layers, self._score, self._choose = window, layers, score, choose
        self._move, self._agree = move, agree
        self._jobs: dict[str, Job] = {}
        self._step: Mapping[str, Step] = {}
        self._to_release: dict[str, int] = {}
        self._failures = 0
        self._failures_said: set[type] = set()

    def forget(self, request_id: str) -> None:
        """It has ended or been preempted."""
        self._jobs.pop(request_id, None)
        self._to_release.pop(request_id, None)

    def begin(self, step: Mapping[str, Step]) -> None:
        """A step of the model begins."""
        self._step = step
        ending = sum(told.final and not told.plan.inline for told in step.values())
        for request_id, told in step.items():
            job = self._jobs.get(request_id)
            if job is None or job.plan != told.plan:
                job = self._jobs[request_id] = Job(told.plan, self._window, self._score, self._choose)
            job.final, job.most_waiting_bytes = told.final, MOST_WAITING_BYTES // max(ending, 1)

    def of_step(self) -> dict[str, Job]:
        """The jobs that the step touches, by request."""
        return {request_id: self._jobs[request_id] for request_id in self._step}

    def end(self) -> dict[str, int]:
        """The layers have run: move what is to be kept. Epochs of the requests that have been pruned, by id."""
        ended = {request_id: self._jobs.pop(request_id) for request_id, told in self._step.items() if told.final}
        for job in ended.values():
            job.choose_scored()
        complete = [len(job.stored if job.plan.inline else job.keeps) == self._layers for job in ended.values()]
        clean = [not job.failures for job in ended.values()]
        everywhere = self._agree(complete + clean) if ended else []
        self._failures += everywhere[len(ended) :].count(False)
        ready = {}
        for (request_id, job), whole in zip(ended.items(), everywhere[: len(ended)], strict=True):
            self._warn_of_failures(job)
            if whole and not job.plan.inline:
                ready[request_id] = job
            elif not whole and job.plan.inline:
                raise RuntimeError("not every layer has stored its part of a prompt's kept tokens")
        if ready:
            self._move_on_all_ranks(ready.values())
        self._to_release |= {request_id: job.plan.released for request_id, job in ready.items()}
        self._step = {}
        return {request_id: job.plan.epoch for request_id, job in ready.items()}

    def _move_on_all_ranks(self, jobs: Iterable[Job]) -> None:
        """Or raise on all of them. An error of a rank whose output nobody reads vLLM would only log, and release pages
        that this rank goes on reading.
        """
        failure: Exception | None = None
        try:
            for job in jobs:
                self._move(list(job.keeps.values()), job.plan)
        except Exception as error:
            failure = error
        if not all(self._agree([failure is None])):
            raise RuntimeError("the kept tokens of a prompt could not be moved on every rank") from failure

    def _warn_of_failures(self, job: Job) -> None:
        instead = "it keeps its last tokens there" if job.plan.inline else "it stays whole"
        for kind in job.failures.keys() - self._failures_said:
            self._failures_said.add(kind)
            logger.warning("a prompt could not be scored in some layers, %s: %s", instead, job.failures[kind])

    def take_failures(self) -> int:
        """Prompts that some rank could not score, since this was last called."""
        failures, self._failures = self._failures, 0
        return failures

    def take_released(self) -> dict[str, int]:
        """Requests whose first columns the worker has to null before it prepares another step, and how many."""
        released, self._to_release = self._to_release, {}
        return released
