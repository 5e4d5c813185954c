"""What kvcompile counts, on its way from vLLM's scheduler to vLLM's /metrics and `LLM.get_metrics()`.

    Tally          in the engine's process: counted and observed since it was last taken
    SchedulerStats vLLM's statistics of a step, which carry it in `kv_connector_stats` under a key of our own: the one
                   field that is a table of anything, whichever process the scheduler is in
    show           in each front end: takes it out before vLLM's loggers look, and adds it to metrics that are made by
                   vLLM's Prometheus logger's classes and labels; so several engines are told apart, several servers
                   added up, and Ray served, as vLLM's own metrics are

Names begin with `vllm:kvcompile_`: `LLM.get_metrics()` shows, and a second engine in a process replaces, what begins
with `vllm:`. A further part of kvcompile lists its metrics here and counts them with its scheduler's tally.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig

from kvcompile.integrations.vllm.active import offloads, prunes

PREFIX = "vllm:kvcompile_"
KEY = "kvcompile"  # in kv_connector_stats, where vLLM's own keys are names of its connectors' classes or their fields
_LABELS = ("model_name", "engine")  # vLLM's


@dataclass(frozen=True)
class Counter:
    """A sum that only grows, shown as `name` + "_total"; one for each of `values` of `label`, if it has one."""

    name: str
    help: str
    label: str = ""
    values: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Histogram:
    """How values are distributed. buckets: their upper ends, ascending; one without end comes on top."""

    name: str
    help: str
    buckets: tuple[float, ...]


_WAYS = ("way", ("two_phase", "inline"))
PRUNED_TOKENS = Counter("pruned_tokens", "Tokens of prompts whose keys and values were pruned.", *_WAYS)
RECLAIMED_BLOCKS = Counter(
    "prune_reclaimed_blocks", "Blocks that requests gave back when pruned, or, stored inline, never took.", *_WAYS
)
REFUSED_PRUNES = Counter(
    "prune_refusals",
    "Requests that would have been pruned and were not, by reason.",
    "reason",
    ("prompt_logprobs", "not_acknowledged", "wrong_request"),
)
INLINE_PROMPTS = Counter("prune_inline_prompts", "Prompts of which the kept tokens alone were ever stored.")
SCORING_FAILURES = Counter(
    "prune_scoring_failures",
    "Prompts that could not be scored in some layers: they stay whole, or, inline, keep their last tokens there.",
)
RESIDENT_TOKENS = Histogram(
    "request_resident_kv_tokens",
    "Tokens whose keys and values a request held when it ended.",
    tuple(2.0**n for n in range(6, 21)),
)
PRUNING = (PRUNED_TOKENS, RECLAIMED_BLOCKS, REFUSED_PRUNES, INLINE_PROMPTS, SCORING_FAILURES, RESIDENT_TOKENS)


def listed(config: VllmConfig) -> tuple[Counter | Histogram, ...]:
    """The metrics that an engine of this configuration has."""
    from kvcompile.integrations.vllm.offload_metrics import OFFLOADING  # which are made of the classes above

    return (PRUNING if prunes(config) else ()) + (OFFLOADING if offloads(config) else ())


class Tally:
    """Counts and observations since `take`. counting: False where nobody asks for statistics: then all is dropped."""

    def __init__(self, *, counting: bool = True) -> None:
        self._counting = counting
        self._clear()

    def _clear(self) -> None:
        self._counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._observed: dict[str, list[float]] = defaultdict(list)

    def add(self, metric: Counter, amount: int = 1, label: str = "") -> None:
        """Raises ValueError for a label that the metric does not list."""
        if label not in metric.values:
            raise ValueError(f"{metric.name} has no {metric.label or 'label'} {label!r}; it has {metric.values}")
        if self._counting and amount:
            self._counts[metric.name][label] += amount

    def observe(self, metric: Histogram, value: float) -> None:
        if self._counting:
            self._observed[metric.name].append(value)

    def take(self) -> dict[str, Any] | None:
        """All of it, for msgpack; None if there is nothing."""
        if not self._counts and not self._observed:
            return None
        taken = {"counts": {name: dict(by) for name, by in self._counts.items()}, "observed": dict(self._observed)}
        self._clear()
        return taken


def send(tally: Tally, outputs: Iterable[Any]) -> None:
    """Put it into the statistics among a step's EngineCoreOutputs, of a step without tokens too: after the last one an
    answer of a worker may come that nobody would hear of until the next request.
    """
    for each in outputs:
        if each.scheduler_stats is not None and (taken := tally.take()):
            each.scheduler_stats.kv_connector_stats = {**(each.scheduler_stats.kv_connector_stats or {}), KEY: taken}


def receive(stats: Any) -> dict[str, Any] | None:
    """Take it out of a SchedulerStats, which is left as vLLM made it: its loggers know no KEY."""
    if stats is None or KEY not in (carried := stats.kv_connector_stats or {}):
        return None
    stats.kv_connector_stats = {key: value for key, value in carried.items() if key != KEY} or None
    return carried[KEY]


class Shown:
    """Metrics of a front end, one of each for every engine it speaks to. logger: vLLM's PrometheusStatLogger."""

    def __init__(self, metrics: Iterable[Counter | Histogram], logger: Any) -> None:
        self._of: dict[tuple[int, str, str], Any] = {}
        for metric in metrics:
            labels, values = list(_LABELS), ("",)
            given = {"name": PREFIX + metric.name, "documentation": metric.help}
            if isinstance(metric, Histogram):
                made = logger._histogram_cls(**given, labelnames=labels, buckets=metric.buckets)
            else:
                labels, values = labels + [metric.label] * bool(metric.label), metric.values
                made = logger._counter_cls(**given, labelnames=labels)
            for engine, own in logger.per_engine_labelvalues.items():
                for value in values:
                    self._of[engine, metric.name, value] = made.labels(*own, *([value] if value else ()))

    def add(self, taken: dict[str, Any], engine: int) -> None:
        """What `Tally.take` gave in this engine."""
        for name, by in taken["counts"].items():
            for label, amount in by.items():
                self._of[engine, name, label].inc(amount)
        for name, values in taken["observed"].items():
            for value in values:
                self._of[engine, name, ""].observe(value)


def show(manager: Any, config: VllmConfig) -> None:
    """Of a StatLoggerManager just made: show our metrics beside vLLM's, if the configuration has any."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    if not (metrics := listed(config)):
        return
    shown = Shown(metrics, next(each for each in manager.stat_loggers if isinstance(each, PrometheusStatLogger)))
    record = manager.record

    def recorded(
        scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int | None = None
    ) -> None:
        if taken := receive(scheduler_stats):
            shown.add(taken, engine_idx or 0)
        record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

    manager.record, manager.kvcompile_shown = recorded, shown


def show_every_step(engine: Any) -> None:
    """Of an LLMEngine just made: its loggers are told of steps with tokens only, its output processor of all."""
    shown: Shown | None = getattr(engine.logger_manager, "kvcompile_shown", None)
    if shown is None:
        return
    update = engine.output_processor.update_scheduler_stats

    def updated(scheduler_stats: Any) -> None:
        if taken := receive(scheduler_stats):
            shown.add(taken, 0)
        update(scheduler_stats)

    engine.output_processor.update_scheduler_stats = updated
