"""Ranks of one tensor parallel group, in processes of their own: a prompt is pruned on all of them or on none."""

from __future__ import annotations

import json

from tests.engine import run_python

RANKS = """
    import json, multiprocessing, sys, tempfile
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
        select = lambda *_: torch.zeros(1, PLAN.kept, dtype=torch.int32)
        jobs = Jobs(4, 1, select, lambda kept, plan: moved.append(plan), prune_ranks.agreement())
        words = []
        # Three prompts in one step, of which the second is not scored on rank 1; a step without any, which asks
        # nobody; and one that no rank has scored.
        for ids, fails in (("abc", "b" if number else ""), ("", ""), ("d", "d"), ("e", "")):
            jobs.begin({name: Step(PLAN, final=True) for name in ids})
            for name, job in jobs.of_step().items():
                if name not in fails:
                    job.observe("layer", torch.zeros(1, 1, 1), torch.zeros(1), torch.zeros(1), 1.0)
            words.append(sorted(jobs.end()))
        said.put((number, words, len(moved), sorted(jobs.take_released())))
        dist.destroy_process_group()

    context = multiprocessing.get_context("fork")
    said = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=rank, args=(number, folder, said)) for number in range(2)]
        for each in ranks:
            each.start()
        found = [said.get(timeout=60) for _ in ranks]
        for each in ranks:
            each.join()
    print("SAID", json.dumps(sorted(found)))
"""


def test_what_one_rank_could_not_score_no_rank_moves_and_all_say_the_same() -> None:
    (line,) = [line for line in run_python(RANKS).splitlines() if line.startswith("SAID ")]
    pruned = [[["a", "c"], [], [], ["e"]], 3, ["a", "c", "e"]]
    assert json.loads(line.removeprefix("SAID ")) == [[0, *pruned], [1, *pruned]]
