"""The scheduler's half of kvcompile's metrics."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from kvcompile.integrations.vllm import metrics


class Counting(Scheduler):
    """Stands before a scheduler class in the method resolution order. tally: sent with each step's statistics."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tally = metrics.Tally(counting=self.log_stats)

    def count(self) -> None:
        """Add to the tally what was counted elsewhere: a step has ended, and workers have been heard."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.count()
        metrics.send(self.tally, outputs.values())
        return outputs
