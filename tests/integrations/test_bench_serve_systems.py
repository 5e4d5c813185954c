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


def test_copies_of_vllms_own_offloading_are_counted_in_an_engine_of_one_process():
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import metrics as offloading

    seen = []
    metric = SimpleNamespace(observe=seen.append, inc=seen.append)
    metrics = object.__new__(offloading.OffloadPromMetrics)
    for name in ("histogram_transfer_size", "counter_kv_bytes", "counter_kv_transfer_time"):
        setattr(metrics, name, {(0, "GPU_to_CPU"): metric})
    data = {"GPU_to_CPU": [offloading.OffloadingOperationMetrics(8, 0.5)]}
    with pytest.raises(AssertionError):
        metrics.observe(data, 0)
    loggers = [SimpleNamespace(), SimpleNamespace(kv_connector_prom=SimpleNamespace(prom_metrics=metrics))]
    serve_engine.spare_connector_metrics(loggers)
    metrics.observe(data, 0)
    metrics.observe({"GPU_to_CPU": [{"op_size": 9, "op_time": 0.25}]}, 0)
    assert seen == [8, 8, 0.5, 9, 9, 0.25]
