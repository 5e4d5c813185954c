"""The worker's half of pruning: what layers note of a prompt while they compute it, and the move at its end.

Every layer scores during the forward pass. Only when all have, kept tokens are moved, as a rewrite in place cannot be
undone half-way; then the worker's own table row gets its null blocks, and the request is acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from kvcompile.integrations.vllm.prune_scheduler import Step
from kvcompile.prune.plan import Plan

# (queries [W, H, d], cache, table row int32 [columns], tokens, kept, scale) -> int32 [G, kept], ascending
Select = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, int, float], torch.Tensor]


@dataclass
class Job:
    """One request from the first chunk that touches the observation window to the end of its prompt."""

    plan: Plan
    window: int
    select: Select
    final: bool = False
    queries: dict[str, torch.Tensor] = field(default_factory=dict)
    keeps: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def observe(
        self, layer: str, query: torch.Tensor, kv_cache: torch.Tensor, table_row: torch.Tensor, scale: float
    ) -> None:
        """Of the request's new tokens in one layer: query [T, H, d], their keys and values are in the cache."""
        earlier = self.queries.get(layer)
        last = query if earlier is None else torch.cat([earlier, query])
        self.queries[layer] = last[-self.window :].clone()
        if self.final:
            keep = self.select(self.queries[layer], kv_cache, table_row, self.plan.tokens, self.plan.kept, scale)
            self.keeps[layer] = kv_cache, table_row, keep


class Jobs:
    """All jobs of a worker."""

    def __init__(
        self,
        window: int,
        layers: int,
        select: Select,
        move: Callable[[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], Plan], None],
    ) -> None:
        self._window, self._layers, self._select, self._move = window, layers, select, move
        self._jobs: dict[str, Job] = {}
        self._step: Mapping[str, Step] = {}
        self._to_release: dict[str, int] = {}

    def forget(self, request_id: str) -> None:
        """It has ended or been preempted."""
        self._jobs.pop(request_id, None)
        self._to_release.pop(request_id, None)

    def begin(self, step: Mapping[str, Step]) -> None:
        """A step of the model begins."""
        self._step = step
        for request_id, told in step.items():
            job = self._jobs.get(request_id)
            if job is None or job.plan != told.plan:
                job = self._jobs[request_id] = Job(told.plan, self._window, self._select)
            job.final = told.final

    def of_step(self) -> dict[str, Job]:
        """The jobs that the step touches, by request."""
        return {request_id: self._jobs[request_id] for request_id in self._step}

    def end(self) -> dict[str, int]:
        """The layers have run: move what is to be kept. Epochs of the requests that have been pruned, by id."""
        acknowledged = {}
        for request_id, told in self._step.items():
            if not told.final:
                continue
            job = self._jobs.pop(request_id)
            if len(job.keeps) == self._layers:
                self._move(list(job.keeps.values()), job.plan)
                self._to_release[request_id] = job.plan.released
                acknowledged[request_id] = job.plan.epoch
        self._step = {}
        return acknowledged

    def take_released(self) -> dict[str, int]:
        """Requests whose first columns the worker has to null before it prepares another step, and how many."""
        released, self._to_release = self._to_release, {}
        return released
