"""Ranks of one tensor parallel group, in processes of their own: a prompt is pruned on all of them or on none."""

from __future__ import annotations

import json

from tests.engine import run_python

RANKS = """
    import json, multiprocessing, sys, tempfile
    from dataclasses import replace
    from types import SimpleNamespace

    import torch
    import torch.distributed as dist

    from kvcompile.integrations.vllm import prune_ranks
    from kvcompile.integrations.vllm.prune_jobs import Jobs
    from kvcompile.integrations.vllm.prune_scheduler import Step
    from kvcompile.prune.plan import Plan

    PLAN = Plan(tokens=100, released=2, block_size=16, epoch=0)

    def rank(number, folder, said):
        dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=number, world_size=2)
        group = SimpleNamespace(world_size=2, cpu_group=dist.group.WORLD)
        prune_ranks.get_tp_group = lambda: group
        moved = []

        def score(layer, queries, *_):
            if number and queries.any():
                raise RuntimeError("no memory left")
            return torch.zeros(1, PLAN.kept, dtype=torch.int32)

        def choose(scores, kept):
            return scores

        def move(kept, plan):
            if number and plan.epoch:
                raise ValueError("cannot")
            moved.append(plan)

        jobs = Jobs(4, 1, score, choose, move, prune_ranks.agreement())
        words = []
        # Three prompts in one step, of which the second is not scored on rank 1; a step without any, which asks
        # nobody; and one that no rank has scored.
        for ids, fails in (("abc", "b" if number else ""), ("", ""), ("d", "d"), ("e", "")):
            jobs.begin({name: Step(PLAN, final=True) for name in ids})
            for name, job in jobs.of_step().items():
                if name not in fails:
                    job.observe("layer", torch.zeros(1, 1, 1), torch.zeros(1), torch.zeros(1), 1.0)
            words.append(sorted(jobs.end()))
        # One that rank 1 cannot score.
        jobs.begin({"g": Step(PLAN, final=True)})
        jobs.of_step()["g"].observe("layer", torch.ones(1, 1, 1), torch.zeros(1), torch.zeros(1), 1.0)
        words.append(sorted(jobs.end()))
        said.put((number, words, len(moved), sorted(jobs.take_released()), jobs.take_failures()))
        # And one that rank 1 has scored and cannot move.
        jobs.begin({"f": Step(replace(PLAN, epoch=1), final=True)})
        jobs.of_step()["f"].observe("layer", torch.zeros(1, 1, 1), torch.zeros(1), torch.zeros(1), 1.0)
        try:
            jobs.end()
        except RuntimeError as error:
            said.put((number + 2, str(error), len(moved), sorted(jobs.take_released())))
        dist.destroy_process_group()

    context = multiprocessing.get_context("fork")
    said = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=rank, args=(number, folder, said)) for number in range(2)]
        for each in ranks:
            each.start()
        found = [said.get(timeout=60) for _ in range(4)]
        for each in ranks:
            each.join()
    print("SAID", json.dumps(sorted(found)))
"""


def test_what_one_rank_could_not_score_no_rank_moves_and_what_one_could_not_move_ends_all() -> None:
    (line,) = [line for line in run_python(RANKS).splitlines() if line.startswith("SAID ")]
    pruned = [[["a", "c"], [], [], ["e"], []], 3, ["a", "c", "e"], 1]
    error = "the kept tokens of a prompt could not be moved on every rank"
    ended = [[2, error, 4, []], [3, error, 3, []]]
    assert json.loads(line.removeprefix("SAID ")) == [[0, *pruned], [1, *pruned], *ended]
