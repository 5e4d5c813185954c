"""When pruning is on: the worker and the scheduler that it takes, and what is in its way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.utils.import_utils import resolve_obj_by_qualname

from kvcompile.config import UsageError
from kvcompile.integrations.vllm import preset, prune_request, report
from kvcompile.integrations.vllm.active import PRUNING_GPU_WORKER, PRUNING_SCHEDULER, PRUNING_WORKER, SCHEDULER
from kvcompile.integrations.vllm.linear_config import W4A8Config
from kvcompile.integrations.vllm.preset import startup_line

STOCK_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


def _options(**prune):
    return {"additional_config": {"kvcompile": {"prune": {"enabled": True, **prune}}}}


def test_by_default_nothing_is_pruned(build):
    config = build()
    assert config.parallel_config.worker_cls == STOCK_WORKER
    assert "prune (prune.enabled=false)" in startup_line(config)


@pytest.mark.parametrize("ordered", [True, False])
def test_it_takes_a_worker_and_a_scheduler_and_the_line_says_what_is_kept(build, ordered):
    options = _options()
    options["additional_config"]["kvcompile"]["scheduler"] = {"enabled": ordered}
    config = build(**options)
    assert config.parallel_config.worker_cls == PRUNING_WORKER
    assert config.scheduler_config.scheduler_cls == (SCHEDULER if ordered else PRUNING_SCHEDULER)
    active, _, _ = startup_line(config).partition("not active")
    assert "prune (robust, of a prompt 50%, at least 544 tokens kept)" in active


def test_the_line_names_an_absolute_budget(build):
    assert "prune (andpro, of a prompt 600 tokens kept)" in startup_line(
        build(**_options(method="andpro", budget_tokens=600))
    )


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"worker_cls": STOCK_WORKER}, "--worker-cls given"),
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "--scheduler-cls given"),
        ({"kv_cache_dtype": "fp8"}, "attention is not kvcompile's"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size given: no rank scores all layers"),
    ],
)
def test_what_is_in_its_way_is_said_and_nothing_of_it_stays(build, fields, why):
    config = build(**_options(), **fields)
    assert f"prune ({why})" in startup_line(config).partition("not active")[2]
    assert config.parallel_config.worker_cls == STOCK_WORKER


def test_ranks_that_share_every_layer_prune(build):
    config = build(**_options(), tensor_parallel_size=2)
    assert config.parallel_config.worker_cls == PRUNING_WORKER


SPLIT = "--enable-dbo or --ubatch-size given: a step is split in parts"


@pytest.mark.parametrize(
    ("cuda", "fields", "worker", "why"),
    [
        (True, {}, PRUNING_GPU_WORKER, None),
        (False, {}, "auto", "neither on a CPU nor on an NVIDIA GPU"),
        (True, {"enable_dbo": True}, "auto", SPLIT),
        (True, {"ubatch_size": 2}, "auto", SPLIT),
    ],
)
def test_on_a_gpu_it_takes_the_worker_of_a_gpu(monkeypatch, cuda, fields, worker, why):
    notes = {}
    monkeypatch.setattr(preset, "current_platform", SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: cuda))
    parallel = {"pipeline_parallel_size": 1, "enable_dbo": False, "ubatch_size": 0, **fields}
    args = SimpleNamespace(attention_backend="CUSTOM", worker_cls="auto", **parallel)
    preset._apply_prune(args, preset.PruneConfig(enabled=True), notes)
    assert (notes.get("prune"), args.worker_cls) == (why, worker)


def test_the_names_of_workers_are_those_of_classes():
    for name, stock in preset._STOCK_WORKERS.items():
        ours, theirs = (resolve_obj_by_qualname(each) for each in (name, stock))
        assert issubclass(ours, theirs) and ours.init_device is not theirs.init_device


def test_to_prune_again_is_not_in_this_version(refusal):
    line = refusal(**_options(reprune_interval_tokens=512))
    allowed = "remove it, or set prune.enabled=false"
    assert line == f"prune.reprune_interval_tokens: not in this version of kvcompile; {allowed}"


def test_a_method_that_needs_output_projections_is_refused_where_they_are_quantised_in_an_unknown_way():
    config = SimpleNamespace(quant_config=None)
    preset._refuse_unknown_projections(config)
    config.quant_config = W4A8Config({256: 128})
    preset._refuse_unknown_projections(config)
    config.quant_config = SimpleNamespace(get_name=lambda: "fp8")
    with pytest.raises(UsageError, match="the quantization of this model is fp8; choose another prune.method"):
        preset._refuse_unknown_projections(config)


def test_a_request_that_asks_for_a_budget_where_nothing_is_pruned_is_refused(build):
    params = SimpleNamespace(extra_args={"kv_budget_tokens": 600}, prompt_logprobs=None)
    with pytest.raises(ValueError, match="kv_budget_tokens is 600 and this server does not prune; leave it out"):
        prune_request.refuse_wrong(build(), params)
    prune_request.refuse_wrong(build(**_options()), params)
    prune_request.refuse_wrong(build(), SimpleNamespace(extra_args={"kv_prune": False}))
    prune_request.refuse_wrong(build(), SimpleNamespace(extra_args=None))
    with pytest.raises(ValueError, match="kv_prune is True and this server does not prune; leave it out"):
        prune_request.refuse_wrong(build(), SimpleNamespace(extra_args={"kv_prune": True}, prompt_logprobs=None))
    params.prompt_logprobs = 0
    with pytest.raises(ValueError, match="kv_budget_tokens is 600 and prompt_logprobs are asked for"):
        prune_request.refuse_wrong(build(**_options()), params)


def test_the_state_names_a_worker_that_is_not_ours(build):
    config = build(**_options())
    config.parallel_config.worker_cls = "a.Worker"
    assert "prune (worker a.Worker)" in report.startup_line(config, {})
