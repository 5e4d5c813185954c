"""What offload does is shown among vLLM's metrics, all of it, and in the step in which it is heard of."""

from __future__ import annotations

import pytest

from kvcompile.integrations.vllm import metrics, offload_control
from kvcompile.integrations.vllm.replay import Replay
from kvcompile.offload.counters import Counters
from kvcompile.schedule.trace import Arrival
from tests.integrations.offload_simulated import BOTH, assert_all_served, at_times, mixed, simulate, soon_or_later

BLOCKS = 40


def test_what_it_does_is_shown_among_vllms_metrics_and_each_reason_is_logged_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = []
    monkeypatch.setattr(offload_control.logger, "warning", lambda text, *given, **_: said.append((text, *given)))
    scheduler, run, worker = simulate(mixed(40), BLOCKS, host_pages=20, fails=at_times, late=soon_or_later)
    counters: Counters = scheduler.offload.counters
    wanted = {
        "offload_bytes to_host": counters.stored_bytes,
        "offload_bytes from_host": counters.loaded_bytes,
        "offload_hit_tokens device": counters.device_tokens,
        "offload_hit_tokens host": counters.host_tokens,
        "offload_prefix_hit_tokens device": counters.prefix_device_tokens,
        "offload_prefix_hit_tokens host": counters.prefix_host_tokens,
        "offload_restores": counters.restores,
        "offload_lost_blocks": counters.lost_pages,
        **{f"offload_fallbacks {reason.name.lower()}": n for reason, n in counters.fallbacks.items()},
    }
    assert scheduler.tally.take() is None
    assert len(counters.fallbacks) > 1
    reasons = [given[0] for text, *given in said if text.startswith("a request is computed again")]
    assert sorted(reasons) == sorted(reason.value for reason in counters.fallbacks)
    assert worker.shown == {name: amount for name, amount in wanted.items() if amount}
    assert {metric.name for metric in metrics.listed(scheduler.vllm_config)} == {name.split()[0] for name in wanted}


@BOTH
def test_what_is_counted_is_shown_with_the_step_in_which_it_is_heard_the_last_of_all_too(asynchronous: bool) -> None:
    """Though the last copies end when no request is left that could get a token."""
    after_the_last = []

    def note(run: Replay) -> None:
        counters: Counters = run.scheduler.offload.counters
        assert run.scheduler._sent._before == counters and run.scheduler.tally.take() is None
        if not run.scheduler.requests:
            after_the_last.append(counters.stored_bytes)

    trace = [Arrival(0.0, 100 + i, 6, 6) for i in range(3)]
    scheduler, run, worker = simulate(trace, BLOCKS, asynchronous=asynchronous, late=lambda rng: 4, after_step=note)
    assert_all_served(run)
    assert after_the_last[0] < after_the_last[-1] == worker.shown["offload_bytes to_host"]
