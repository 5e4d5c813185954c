"""Whether all ranks can prune a prompt, before any of them moves a token, and whether all of them have.

vLLM hands the scheduler the output of one rank, and pages are released on its word: a rank that had not pruned would go
on reading pages that are somebody else's by then. Ranks are told the same and run the same graphs, but each scores in
memory of its own, which may run out. So they ask each other: a few bytes, on the CPU, in steps that end a prompt and in
no other. What is wrong on one of them is an error, or a failure that is counted, on all: of other ranks nobody hears.
"""

from __future__ import annotations

import torch
from torch.distributed import ReduceOp, all_reduce
from vllm.distributed.parallel_state import get_tp_group

from kvcompile.integrations.vllm.prune_jobs import Agree


def agreement() -> Agree:
    """For a worker whose tensor parallel group exists; every rank has to call the result in the same steps."""
    group = get_tp_group()
    if group.world_size == 1:
        return list

    def on_all(on_this: list[bool]) -> list[bool]:
        said = torch.tensor(on_this, dtype=torch.int32)
        all_reduce(said, op=ReduceOp.MIN, group=group.cpu_group)
        return said.bool().tolist()

    return on_all
