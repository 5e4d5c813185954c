"""What a worker notes of prompts that are to be pruned, and that nothing is moved before every layer has scored."""

from __future__ import annotations

import pytest
import torch

from kvcompile.integrations.vllm.prune_jobs import Jobs
from kvcompile.integrations.vllm.prune_scheduler import Step
from kvcompile.prune.plan import Plan

PLAN = Plan(tokens=100, released=2, block_size=16, epoch=0)
LAYERS = ("a", "b")
ROW = torch.arange(7, dtype=torch.int32)


class Worker:
    """Jobs whose selections and moves are noted."""

    def __init__(self) -> None:
        self.selected: list[torch.Tensor] = []
        self.moved: list[tuple[int, Plan]] = []
        self.jobs = Jobs(4, len(LAYERS), self._select, lambda kept, plan: self.moved.append((len(kept), plan)))

    def _select(
        self, queries: torch.Tensor, cache: torch.Tensor, row: torch.Tensor, tokens: int, kept: int, scale: float
    ):
        assert (tokens, kept, scale) == (100, 68, 0.5) and torch.equal(row, ROW)
        self.selected.append(queries)
        return torch.zeros(1, kept, dtype=torch.int32)

    def step(
        self, steps: dict[str, Step], new: int, layers: tuple[str, ...] = LAYERS, first: int = 0
    ) -> dict[str, int]:
        self.jobs.begin(steps)
        queries = torch.arange(first, first + new, dtype=torch.float32)[:, None, None]
        for layer in layers:
            for job in self.jobs.of_step().values():
                job.observe(layer, queries, torch.zeros(1), ROW, 0.5)
        return self.jobs.end()


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_a_prompt_in_one_step_is_scored_by_its_last_queries_moved_and_acknowledged(worker: Worker) -> None:
    assert worker.step({"x": Step(PLAN, final=True)}, 10) == {"x": 0}
    assert [queries.flatten().tolist() for queries in worker.selected] == [[6, 7, 8, 9]] * 2
    assert worker.moved == [(2, PLAN)]
    assert worker.jobs.take_released() == {"x": 2} and worker.jobs.take_released() == {}


def test_a_window_over_several_chunks_is_put_together(worker: Worker) -> None:
    assert worker.step({"x": Step(PLAN, final=False)}, 3) == {}
    assert worker.step({}, 0) == {}  # a step without it in between
    assert worker.step({"x": Step(PLAN, final=False)}, 2, first=3) == {}
    assert not worker.selected
    assert worker.step({"x": Step(PLAN, final=True)}, 1, first=5) == {"x": 0}
    assert [queries.flatten().tolist() for queries in worker.selected] == [[2, 3, 4, 5]] * 2


def test_without_the_scores_of_a_layer_nothing_is_moved_and_nothing_said(worker: Worker) -> None:
    assert worker.step({"x": Step(PLAN, final=True)}, 10, layers=LAYERS[:1]) == {}
    assert not worker.moved and worker.jobs.take_released() == {}


def test_a_request_that_comes_back_begins_anew(worker: Worker) -> None:
    worker.step({"x": Step(PLAN, final=False)}, 3)
    again = Plan(tokens=100, released=2, block_size=16, epoch=1)
    assert worker.step({"x": Step(again, final=True)}, 5, first=50) == {"x": 1}
    assert worker.selected[0].flatten().tolist() == [51, 52, 53, 54]


def test_what_has_ended_is_forgotten(worker: Worker) -> None:
    worker.step({"x": Step(PLAN, final=False)}, 3)
    worker.jobs.forget("x")
    worker.step({"x": Step(PLAN, final=True)}, 2, first=70)
    assert worker.selected[0].flatten().tolist() == [70, 71]
    worker.jobs.forget("x")
    assert worker.jobs.take_released() == {}
