"""vLLM and kvcompile take what `kvcompile bench serve` gives each system, and make of it what it expects."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvcompile.tools import serve_engine, serve_systems

# What depends on the platform, or on the model once it is loaded.
ELSEWHERE = {"graphs", "asynchronous", "attention", "linears"}


@pytest.mark.parametrize("name", serve_systems.SYSTEMS)
def test_a_system_is_configured_as_it_is_meant_to_be(engine_args, name):
    fields = {"dtype": "bfloat16", "enable_prefix_caching": False, "block_size": 16, "max_model_len": 256}
    config = engine_args(**fields, **serve_systems.arguments_of(name, host_gib=1)).create_engine_config()
    facts, expected = serve_engine.of_config(config), serve_systems.SYSTEMS[name].expected
    assert {key: facts[key] for key in expected.keys() - ELSEWHERE} == {
        key: expected[key] for key in expected.keys() - ELSEWHERE
    }
    pool = config.kv_transfer_config and config.kv_transfer_config.kv_connector_extra_config
    assert not pool or pool["cpu_bytes_to_use"] == 1 << 30


def test_copies_of_vllms_own_offloading_are_counted_and_told_in_an_engine_of_one_process():
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import metrics as offloading
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
    from vllm.v1.metrics.stats import SchedulerStats

    seen, said = [], []
    metric = SimpleNamespace(observe=seen.append, inc=seen.append)
    counters = object.__new__(offloading.OffloadPromMetrics)
    for name in ("histogram_transfer_size", "counter_kv_bytes", "counter_kv_transfer_time"):
        setattr(counters, name, {(0, "GPU_to_CPU"): metric})
    log = object.__new__(KVConnectorLogging)
    log.connector_cls = OffloadingConnector
    log.reset()

    def record(scheduler_stats, iteration_stats, engine_idx=0):
        if scheduler_stats is not None:
            counters.observe(scheduler_stats.kv_connector_stats, engine_idx)
            log.observe(scheduler_stats.kv_connector_stats)

    copy = SchedulerStats(kv_connector_stats={"GPU_to_CPU": [offloading.OffloadingOperationMetrics(8, 0.5)]})
    with pytest.raises(AssertionError):
        record(copy, None)
    manager = SimpleNamespace(record=record)
    serve_engine.spare_connector_metrics(manager)
    manager.record(None, None)
    manager.record(copy, None, engine_idx=0)
    manager.record(SchedulerStats(kv_connector_stats={"GPU_to_CPU": [{"op_size": 9, "op_time": 0.25}]}), None)
    log.log(lambda text, *values: said.append(text % values))
    assert seen == [8, 8, 0.5, 9, 9, 0.25]
    assert "GPU_to_CPU_total_bytes=17, GPU_to_CPU_total_time=0.75" in said[0]
