"""What is counted in a scheduler reaches a front end, over msgpack too, and vLLM's own statistics stay as they were."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.loggers import LoggingStatLogger, StatLoggerManager
from vllm.v1.metrics.reader import get_metrics_snapshot
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvcompile.integrations.vllm import metrics, replay
from kvcompile.integrations.vllm.active import PRUNING_WORKER
from kvcompile.integrations.vllm.metrics import PRUNED_TOKENS, REFUSED_PRUNES, RESIDENT_TOKENS, SCORING_FAILURES, Tally


def outputs(tokens: int = 1) -> EngineCoreOutputs:
    """Of a step in which so many requests got a token."""
    each = [EngineCoreOutput(request_id=str(i), new_token_ids=[7]) for i in range(tokens)]
    return EngineCoreOutputs(outputs=each, scheduler_stats=SchedulerStats(num_running_reqs=3))


def carried(tally: Tally) -> SchedulerStats:
    """The statistics of a step as they come out of the socket between two processes."""
    step = outputs()
    metrics.send(tally, [step])
    return MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(step)).scheduler_stats


@pytest.fixture
def config() -> Iterator[Any]:
    """vLLM's configuration of an engine that prunes. What its loggers register is taken back."""
    config = replay.replay_config(max_model_len=512)
    config.parallel_config.worker_cls = PRUNING_WORKER
    before = set(REGISTRY._collector_to_names)
    yield config
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def shown() -> dict[tuple[str, ...], Any]:
    """What `LLM.get_metrics()` has of kvcompile's: (name, engine, label) -> metric."""
    found = {}
    for metric in get_metrics_snapshot():
        if metric.name.startswith(metrics.PREFIX):
            own = [value for name, value in metric.labels.items() if name not in ("model_name", "engine")]
            found[metric.name.removeprefix(metrics.PREFIX), metric.labels["engine"], *own] = metric
    return found


def test_counts_add_up_until_they_are_taken() -> None:
    tally = Tally()
    tally.add(PRUNED_TOKENS, 32, "inline")
    tally.add(PRUNED_TOKENS, 16, "inline")
    tally.add(REFUSED_PRUNES, label="prompt_logprobs")
    tally.observe(RESIDENT_TOKENS, 70)
    tally.observe(RESIDENT_TOKENS, 70)
    assert tally.take() == {
        "counts": {"pruned_tokens": {"inline": 48}, "prune_refusals": {"prompt_logprobs": 1}},
        "observed": {"request_resident_kv_tokens": [70, 70]},
    }
    assert tally.take() is None


def test_where_nobody_asks_for_statistics_nothing_is_kept() -> None:
    tally = Tally(counting=False)
    tally.add(PRUNED_TOKENS, 32, "inline")
    tally.observe(RESIDENT_TOKENS, 70)
    assert tally.take() is None


def test_a_label_that_is_not_listed_is_refused_where_it_is_counted() -> None:
    with pytest.raises(ValueError, match="prune_refusals has no reason 'mood'"):
        Tally().add(REFUSED_PRUNES, label="mood")
    with pytest.raises(ValueError, match="prune_scoring_failures has no label 'x'"):
        Tally().add(SCORING_FAILURES, label="x")
    with pytest.raises(ValueError, match="pruned_tokens has no way ''; it has"):
        Tally().add(PRUNED_TOKENS)


def test_what_is_counted_survives_the_way_to_another_process_and_leaves_vllm_s_statistics_as_they_were() -> None:
    tally = Tally()
    tally.add(REFUSED_PRUNES, 2, label="prompt_logprobs")
    tally.observe(RESIDENT_TOKENS, 70)
    stats = carried(tally)
    assert metrics.receive(stats) == {
        "counts": {"prune_refusals": {"prompt_logprobs": 2}},
        "observed": {"request_resident_kv_tokens": [70]},
    }
    assert stats == SchedulerStats(num_running_reqs=3)
    assert metrics.receive(stats) is None and metrics.receive(None) is None


def test_the_statistics_of_a_kv_connector_travel_beside_it() -> None:
    tally, step = Tally(), outputs()
    tally.add(PRUNED_TOKENS, label="inline")
    theirs = step.scheduler_stats.kv_connector_stats = {"SomeConnector": {"data": [1]}}
    metrics.send(tally, [step])
    assert theirs == {"SomeConnector": {"data": [1]}}  # the connector's own object
    assert metrics.receive(step.scheduler_stats)["counts"] == {"pruned_tokens": {"inline": 1}}
    assert step.scheduler_stats.kv_connector_stats == theirs


def test_counts_wait_for_a_step_with_statistics_and_for_no_tokens() -> None:
    """Copies to the host may end after the last token of all."""
    tally = Tally()
    tally.add(PRUNED_TOKENS, 5, "inline")
    without, none = outputs(0), outputs()
    none.scheduler_stats = None
    metrics.send(tally, [none])
    metrics.send(tally, [none, without])
    assert metrics.receive(without.scheduler_stats)["counts"] == {"pruned_tokens": {"inline": 5}}
    assert tally.take() is None


def test_an_engine_whose_loggers_hear_of_no_step_without_tokens_shows_what_comes_with_one(config: Any) -> None:
    """As vLLM's LLM, which hands every step's statistics to its output processor."""
    heard = []
    engine = SimpleNamespace(
        logger_manager=StatLoggerManager(config, enable_default_loggers=False),
        output_processor=SimpleNamespace(update_scheduler_stats=heard.append),
    )
    metrics.show_every_step(engine)
    for tokens in (0, 2):
        tally, step = Tally(), outputs(tokens)
        tally.add(PRUNED_TOKENS, 5, "inline")
        metrics.send(tally, [step])
        engine.output_processor.update_scheduler_stats(step.scheduler_stats)
        if step.outputs:
            engine.logger_manager.record(scheduler_stats=step.scheduler_stats, iteration_stats=None)
    engine.output_processor.update_scheduler_stats(None)
    assert shown()["pruned_tokens", "0", "inline"].value == 10
    assert heard == [SchedulerStats(num_running_reqs=3)] * 2 + [None]


@pytest.mark.parametrize("manager", [None, SimpleNamespace()], ids=["no statistics", "nothing of ours"])
def test_an_engine_with_none_of_our_metrics_is_left_as_it_is(manager: Any) -> None:
    engine = SimpleNamespace(logger_manager=manager)
    metrics.show_every_step(engine)
    assert vars(engine) == {"logger_manager": manager}


def test_every_metric_is_shown_from_the_start_with_vllm_s_own_labels(config: Any) -> None:
    StatLoggerManager(config, engine_idxs=[0, 1], enable_default_loggers=False)
    found = shown()
    wanted = [(REFUSED_PRUNES.name, reason) for reason in REFUSED_PRUNES.values]
    wanted += [(name, way) for name in ("pruned_tokens", "prune_reclaimed_blocks") for way in ("two_phase", "inline")]
    wanted += [("prune_inline_prompts",), ("prune_scoring_failures",), ("request_resident_kv_tokens",)]
    assert set(found) == {(name, engine, *own) for name, *own in wanted for engine in "01"}
    theirs = next(m for m in get_metrics_snapshot() if m.name == "vllm:num_preemptions")
    assert found["prune_scoring_failures", "0"].labels == theirs.labels
    assert all(metric.value == 0 for key, metric in found.items() if key[0] != "request_resident_kv_tokens")


def test_engines_are_told_apart_and_steps_add_up(config: Any) -> None:
    manager = StatLoggerManager(config, engine_idxs=[0, 1])
    assert isinstance(manager.stat_loggers[0].per_engine_stat_loggers[1], LoggingStatLogger)
    for engine, tokens in ((0, 32), (1, 16), (0, 8), (None, 1)):
        tally = Tally()
        tally.add(PRUNED_TOKENS, tokens, "inline")
        tally.add(REFUSED_PRUNES, label="prompt_logprobs")
        tally.observe(RESIDENT_TOKENS, 2 * tokens)
        # vLLM's logger of lines would fail on statistics of a connector that is not there.
        manager.record(scheduler_stats=carried(tally), iteration_stats=None, engine_idx=engine)
    manager.record(scheduler_stats=SchedulerStats(num_running_reqs=9), iteration_stats=None, engine_idx=0)
    manager.record(scheduler_stats=None, iteration_stats=None, engine_idx=0)
    found = shown()
    assert [found["pruned_tokens", engine, "inline"].value for engine in "01"] == [41, 16]
    assert [found["prune_refusals", engine, "prompt_logprobs"].value for engine in "01"] == [3, 1]
    assert found["prune_refusals", "0", "wrong_request"].value == 0
    resident = found["request_resident_kv_tokens", "0"]
    assert (resident.count, resident.sum) == (3, 64 + 16 + 2)
    assert [float(end) for end in resident.buckets] == [*RESIDENT_TOKENS.buckets, float("inf")]
    assert set(resident.buckets.values()) == {3}
    running = {m.labels["engine"]: m.value for m in get_metrics_snapshot() if m.name == "vllm:num_requests_running"}
    assert running == {"0": 9, "1": 3}


def test_a_second_engine_in_a_process_replaces_the_first_as_with_vllm_s_metrics(config: Any) -> None:
    for tokens in (32, 16):
        manager = StatLoggerManager(config, enable_default_loggers=False)
        tally = Tally()
        tally.add(PRUNED_TOKENS, tokens, "inline")
        manager.record(scheduler_stats=carried(tally), iteration_stats=None)
    assert shown()["pruned_tokens", "0", "inline"].value == 16


def test_an_engine_that_does_not_prune_has_vllm_s_own_manager_to_the_letter(config: Any) -> None:
    config.parallel_config.worker_cls = "auto"
    manager = StatLoggerManager(config, enable_default_loggers=False)
    assert "record" not in vars(manager) and not shown()


def test_metrics_are_made_by_the_classes_of_the_logger_in_use() -> None:
    """Ray's, say, which take other names and no registry."""
    made: list[tuple[str, tuple[Any, ...]]] = []

    class Metric:
        def __init__(self, name: str, documentation: str, labelnames: list[str], buckets: Any = None) -> None:
            self.name, self.labelnames = name, labelnames

        def labels(self, *values: Any) -> Metric:
            assert len(values) == len(self.labelnames)
            made.append((self.name, values))
            return self

    logger = SimpleNamespace(_counter_cls=Metric, _histogram_cls=Metric, per_engine_labelvalues={4: ["m", "4"]})
    metrics.Shown(metrics.PRUNING, logger)
    assert ("vllm:kvcompile_prune_scoring_failures", ("m", "4")) in made
    assert ("vllm:kvcompile_prune_refusals", ("m", "4", "wrong_request")) in made


def test_names_are_distinct_and_those_that_prometheus_takes() -> None:
    names = [metric.name for metric in metrics.PRUNING]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() and name.islower() for name in names)
    assert list(RESIDENT_TOKENS.buckets) == sorted(RESIDENT_TOKENS.buckets)
    assert RESIDENT_TOKENS.buckets[0] == 64 and RESIDENT_TOKENS.buckets[-1] == 1 << 20
