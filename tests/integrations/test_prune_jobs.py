"""What a worker notes of prompts that are to be pruned, and that nothing is moved before every layer has scored."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvcompile.integrations.vllm import prune_jobs
from kvcompile.integrations.vllm.prune_jobs import Jobs
from kvcompile.integrations.vllm.prune_scheduler import Step
from kvcompile.ops.prune import pages_of
from kvcompile.prune.plan import Plan

PLAN = Plan(tokens=100, released=2, block_size=16, epoch=0)
LAYERS = ("a", "b")
ROW = torch.arange(7, dtype=torch.int32)


class Worker:
    """Jobs whose selections and moves are noted."""

    def __init__(self) -> None:
        self.selected: list[torch.Tensor] = []
        self.chosen: list[int] = []
        self.failing: dict[str, Exception] = {}
        self.moved: list[tuple[int, Plan]] = []
        self.jobs = Jobs(
            4, len(LAYERS), self._score, self._choose, lambda kept, plan: self.moved.append((len(kept), plan))
        )

    def _score(
        self, layer: str, queries: torch.Tensor, cache: torch.Tensor, row: torch.Tensor, tokens: int, scale: float
    ) -> torch.Tensor:
        assert (tokens, scale) == (100, 0.5) and torch.equal(row, ROW)
        if error := self.failing.get(layer):
            raise error
        self.selected.append(queries)
        return torch.zeros(1, 1, tokens)

    def _choose(self, scores: list[torch.Tensor], kept: int) -> list[torch.Tensor]:
        assert kept == 68
        self.chosen.append(len(scores))
        return [torch.zeros(1, kept, dtype=torch.int32)] * len(scores)

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


def test_a_prompt_whose_scores_fail_stays_whole_and_is_counted(worker: Worker) -> None:
    worker.failing = {"b": RuntimeError("no memory left")}
    assert worker.step({"x": Step(PLAN, final=True)}, 10) == {}
    assert not worker.moved and worker.jobs.take_released() == {}
    assert worker.jobs.take_failures() == 1 and worker.jobs.take_failures() == 0


def test_layers_choose_together_when_all_have_scored_or_scores_take_much_memory(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.step({"x": Step(PLAN, final=True)}, 10)
    assert worker.chosen == [2]
    monkeypatch.setattr(prune_jobs, "MOST_WAITING_BYTES", 399)  # scores of a layer have 400
    assert worker.step({"x": Step(PLAN, final=True)}, 10) == {"x": 0}
    assert worker.chosen == [2, 1, 1] and [layers for layers, _ in worker.moved] == [2, 2]


def test_prompts_that_end_in_one_step_share_the_memory_of_waiting_scores(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prune_jobs, "MOST_WAITING_BYTES", 1600)  # scores of a layer have 400
    two = {"x": Step(PLAN, final=True), "y": Step(PLAN, final=True)}
    assert worker.step({**two, "z": Step(PLAN, final=False)}, 10) == {"x": 0, "y": 0}
    assert worker.chosen == [2, 2]
    monkeypatch.setattr(prune_jobs, "MOST_WAITING_BYTES", 799)
    assert worker.step(two, 10) == {"x": 0, "y": 0}
    assert worker.chosen == [2, 2, 1, 1, 1, 1]


def test_a_prompt_whose_choice_fails_stays_whole_and_is_counted(worker: Worker) -> None:
    def fails(*_: object) -> list[torch.Tensor]:
        raise RuntimeError("no memory left")

    worker.jobs._choose = fails
    assert worker.step({"x": Step(PLAN, final=True)}, 10) == {}
    assert not worker.moved and worker.jobs.take_failures() == 1


def test_of_a_prompt_that_ends_in_one_step_no_layer_keeps_its_queries(worker: Worker) -> None:
    worker.jobs.begin({"x": Step(PLAN, final=True)})
    (job,) = worker.jobs.of_step().values()
    for layer in LAYERS:
        job.observe(layer, torch.zeros(10, 1, 1), torch.zeros(1), ROW, 0.5)
    assert job.scored.keys() == {"a", "b"} and not job.queries


def test_a_move_that_fails_is_an_error_and_not_acknowledged(worker: Worker) -> None:
    def fails(*_: object) -> None:
        raise ValueError("prune_compact: cannot")

    worker.jobs._move = fails
    with pytest.raises(RuntimeError, match="the kept tokens of a prompt could not be moved on every rank") as raised:
        worker.step({"x": Step(PLAN, final=True)}, 10)
    assert str(raised.value.__cause__) == "prune_compact: cannot"
    assert worker.jobs.take_released() == {}


class InlineStep:
    """A prompt of 100 tokens, two KV heads of 64, stored inline in a layer's cache of 12 pages full of marks."""

    def __init__(self, worker: Worker, layers: tuple[str, ...] = LAYERS) -> None:
        generator = torch.Generator().manual_seed(0)
        self.key, self.value = (torch.randn(100, 2, 64, generator=generator) for _ in range(2))
        self.prompt, row = pages_of(self.key, self.value)
        self.cache = torch.full((12, 2, 16, 2, 68), 77, dtype=torch.int8)
        self.table = torch.tensor([0, 0, 3, 9, 5, 7, 4, 11], dtype=torch.int32)
        worker.jobs.begin({"x": Step(replace(PLAN, inline=True), final=True)})
        (job,) = worker.jobs.of_step().values()
        for layer in layers:
            queries = torch.zeros(100, 4, 64)
            job.store(layer, queries, self.prompt, row, self.cache, self.table, 0.5)

    def assert_holds(self, keep: torch.Tensor) -> None:
        """keep: int [2, 68]. All other slots, those of the null block among them, have their marks."""
        expected = torch.full_like(self.cache, 77)
        for head, kept in enumerate(keep.tolist()):
            for position, token in enumerate(kept, start=32):
                page, slot = int(self.table[position // 16]), position % 16
                expected[page, :, slot, head] = self.prompt[token // 16, :, token % 16, head]
        assert torch.equal(self.cache, expected)


def test_a_prompt_that_is_stored_inline_leaves_its_kept_tokens_in_its_pages_and_nothing_else(worker: Worker) -> None:
    keep = torch.stack([torch.arange(0, 68), torch.arange(0, 100)[-68:]]).int()
    worker.jobs._score, worker.jobs._choose = (lambda *_: keep), lambda scores, kept: scores
    step = InlineStep(worker)
    step.assert_holds(keep)
    # There is nothing to release and nothing to say.
    assert worker.jobs.end() == {} and worker.jobs.take_released() == {} and not worker.moved
    assert worker.jobs.take_failures() == 0


def test_where_scores_fail_a_prompt_that_is_stored_inline_keeps_its_last_tokens(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(prune_jobs, "logger", SimpleNamespace(warning=lambda text, *given: said.append(text % given)))

    def fails(*_: object) -> torch.Tensor:
        raise ValueError("prune_score: cannot")

    worker.jobs._score = fails
    for _ in range(2):
        step = InlineStep(worker)
        step.assert_holds(torch.arange(32, 100).expand(2, -1))
        assert worker.jobs.end() == {}
    assert worker.jobs.take_failures() == 2
    assert said == ["a prompt could not be scored in some layers, it keeps its last tokens there: prune_score: cannot"]


def test_a_layer_that_has_not_stored_its_part_of_an_inline_prompt_is_an_error(worker: Worker) -> None:
    keep = torch.arange(68).repeat(2, 1).int()
    worker.jobs._score, worker.jobs._choose = (lambda *_: keep), lambda scores, kept: scores
    InlineStep(worker, LAYERS[:1])
    with pytest.raises(RuntimeError, match="not every layer has stored its part of a prompt's kept tokens"):
        worker.jobs.end()
