"""When pruning is on, as it is by default: the worker and the scheduler that it takes, and what is in its way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.utils.import_utils import resolve_obj_by_qualname

from kvcompile.config import UsageError, resolve
from kvcompile.integrations.vllm import prune_preset, prune_request, report
from kvcompile.integrations.vllm.active import PRUNING_GPU_WORKER, PRUNING_SCHEDULER, PRUNING_WORKER, SCHEDULER
from kvcompile.integrations.vllm.linear_config import W4A8Config
from kvcompile.integrations.vllm.preset import startup_line

STOCK_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


def _options(**prune):
    return {"additional_config": {"kvcompile": {"prune": {"enabled": True, **prune}}}}


OFF = {"additional_config": {"kvcompile": {"prune.enabled": False}}}


def test_by_default_prompts_are_pruned(build):
    config = build()
    assert config.parallel_config.worker_cls == PRUNING_WORKER
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    assert "prune (robust, of a prompt 50%, at least 544 tokens kept" in startup_line(config).partition("not active")[0]


def test_switched_off_nothing_of_it_is_there(build):
    config = build(**OFF)
    assert config.parallel_config.worker_cls == STOCK_WORKER
    assert "prune (prune.enabled=false)" in startup_line(config).partition("not active")[2]


@pytest.mark.parametrize("name", ["VLLM_ANDPRO_BUDGET_TOKENS", "KVCOMPILE_PRUNE_BUDGET_TOKENS"])
def test_a_budget_is_enough_and_where_pruning_is_switched_off_it_does_nothing_and_that_is_said(
    build, monkeypatch, name
):
    monkeypatch.setenv(name, "200")
    assert "prune (robust, of a prompt 200 tokens kept)" in startup_line(build(block_size=16))
    monkeypatch.setenv("KVCOMPILE_PRUNE_ENABLED", "0")
    assert "prune (prune.enabled=false, so nothing comes of prune.budget_tokens)" in startup_line(build())


@pytest.mark.parametrize("ordered", [True, False])
def test_it_takes_a_worker_and_a_scheduler_and_the_line_says_what_is_kept(build, ordered):
    options = _options()
    options["additional_config"]["kvcompile"]["scheduler"] = {"enabled": ordered}
    config = build(**options)
    assert config.parallel_config.worker_cls == PRUNING_WORKER
    assert config.scheduler_config.scheduler_cls == (SCHEDULER if ordered else PRUNING_SCHEDULER)
    active, _, _ = startup_line(config).partition("not active")
    assert "prune (robust, of a prompt 50%, at least 544 tokens kept, " in active


def test_the_line_names_an_absolute_budget(build):
    config = build(**_options(method="andpro", budget_tokens=200), block_size=16)
    assert "prune (andpro, of a prompt 200 tokens kept)" in startup_line(config)


NO_KV8 = {"kv8.enabled": False}
CLASS = "vllm.v1.core.sched.scheduler.Scheduler"
NOT_OURS = "attention is not kvcompile's"
# What the user gives -> kvcompile's options, vLLM's, and why nothing is pruned then.
IN_ITS_WAY = {
    "worker": ({}, {"worker_cls": STOCK_WORKER}, "--worker-cls given"),
    "scheduler": ({"scheduler.enabled": False}, {"scheduler_cls": CLASS}, "--scheduler-cls given"),
    "vLLM's cache": (NO_KV8, {}, NOT_OURS),
    "LoRA": (NO_KV8, {"enable_lora": True, "enforce_eager": False}, NOT_OURS),
    "stages": ({}, {"pipeline_parallel_size": 2}, "--pipeline-parallel-size given: no rank scores all layers"),
    "large blocks": (
        {},
        {"block_size": 1024},
        "prune.min_tokens is 544, less than prune.sink_tokens + prune.window_tokens + 1024 = 1060: give "
        "prune.min_tokens at least 1060, or lower prune.window_tokens or prune.sink_tokens or --block-size",
    ),
}
# LoRA rules compilation out.
NO_PASSES = {"norm_quant": False, "swiglu_quant": False, "rotary": False, "attention_swap": False}


def _given(options, fields, **more):
    return {"additional_config": {"kvcompile": {**options, "passes": NO_PASSES, **more}}, **fields}


@pytest.mark.parametrize(("options", "fields", "why"), IN_ITS_WAY.values(), ids=IN_ITS_WAY)
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_by_default_what_is_in_its_way_is_said_and_works_as_without_it(build, options, fields, why, strict):
    config = build(**_given(options, fields, strict=strict))
    assert f"prune ({why})" in startup_line(config).partition("not active")[2]
    assert config.parallel_config.worker_cls == STOCK_WORKER
    ordered = "scheduler_cls" not in fields
    assert config.scheduler_config.scheduler_cls == (SCHEDULER if ordered else CLASS)


@pytest.mark.parametrize(("options", "fields", "why"), IN_ITS_WAY.values(), ids=IN_ITS_WAY)
@pytest.mark.parametrize("asked", [{"enabled": True}, {"keep_ratio": 0.5}], ids=["switched on", "an option"])
def test_asked_for_it_is_an_error_under_strict_what_is_in_its_way(refusal, options, fields, why, asked):
    said = refusal(**_given(options, fields, strict=True, prune=asked))
    of_strict = f"strict is set and prune is not active: {why}; remove what is in its way, or strict"
    assert said == (why if "block_size" in fields else of_strict)


def test_under_strict_pruning_by_default_excuses_no_other_part(refusal):
    fields = {"kv_cache_dtype": "fp8"}
    assert refusal(**_given({}, fields, strict=True)).startswith("strict is set and kv8 is not active: --kv-cache-dty")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"worker_cls": STOCK_WORKER}, "--worker-cls given"),
        ({"scheduler_cls": CLASS}, "--scheduler-cls given"),
        ({"kv_cache_dtype": "fp8"}, NOT_OURS),
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
    monkeypatch.setattr(prune_preset, "current_platform", SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: cuda))
    parallel = {"pipeline_parallel_size": 1, "enable_dbo": False, "ubatch_size": 0, **fields}
    args = SimpleNamespace(worker_cls="auto", **parallel)
    prune_preset.apply(args, resolve(environ={}), notes, our_attention=True)
    assert (notes.get("prune"), args.worker_cls) == (why, worker)


def test_the_names_of_workers_are_those_of_classes():
    for name, stock in prune_preset._STOCK_WORKERS.items():
        ours, theirs = (resolve_obj_by_qualname(each) for each in (name, stock))
        assert issubclass(ours, theirs) and ours.init_device is not theirs.init_device


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("given", [40, 52])  # below what the smallest block needs, and enough with that
@pytest.mark.parametrize(("name", "more"), [("budget_tokens", {}), ("min_tokens", {"keep_ratio": 0.1})])
def test_a_budget_that_a_block_makes_too_small_is_refused_with_what_that_block_needs(
    build, refusal, block, given, name, more
):
    options = {name: given, **more}
    assert refusal(**_options(**options), block_size=block) == (
        f"prune.{name} is {given}, less than prune.sink_tokens + prune.window_tokens + {block} = {36 + block}: give "
        f"prune.{name} at least {36 + block}, or lower prune.window_tokens or prune.sink_tokens or --block-size "
        f"(prune.{name} is from --additional-config)"
    )


def test_a_budget_that_no_block_makes_right_is_refused_even_where_nothing_is_pruned(build, refusal):
    for fields in (_options(budget_tokens=40, enabled=False), {**_options(budget_tokens=40), "scheduler_cls": "a.B"}):
        assert "+ a block: 52 with 16, 68 with" in refusal(**fields)
    build(**_options(budget_tokens=52), block_size=16)
    build(**_options(budget_tokens=52, enabled=False), block_size=128)


@pytest.mark.parametrize("block", [16, 32, 64])
def test_a_request_is_told_the_least_budget_of_the_servers_blocks(build, block):
    config = build(block_size=block)
    params = SimpleNamespace(extra_args={"kv_budget_tokens": 40}, prompt_logprobs=None)
    with pytest.raises(
        VLLMValidationError, match=f"kv_budget_tokens is 40; allowed are integers of at least {36 + block}, "
    ):
        prune_request.refuse_wrong(config, params)


def test_the_other_name_of_the_budget_is_named_where_it_is_too_small(monkeypatch, refusal):
    monkeypatch.setenv("VLLM_ANDPRO_BUDGET_TOKENS", "100")
    assert refusal(**_options(), block_size=128).endswith(
        "(prune.budget_tokens is from environment VLLM_ANDPRO_BUDGET_TOKENS)"
    )


def _inline(step, *, model_len=256, strict=False, **fields):
    options = _options(inline="always", budget_tokens=64)
    options["additional_config"]["kvcompile"]["strict"] = strict
    small = {"max_num_batched_tokens": step, "max_num_seqs": 8, "max_model_len": model_len, "block_size": 16}
    return {**options, **small, **fields, "enforce_eager": False}


NO_INLINE = (
    "prune.inline=always stores no prompt inline: the shortest that is pruned has 80 tokens, and a step computes"
)


def test_inline_that_no_step_has_room_for_is_said_and_an_error_under_strict(build, refusal):
    assert f"64 tokens kept, {NO_INLINE} 79)" in startup_line(build(**_inline(79)))
    allowed = "raise --max-num-batched-tokens, or set prune.inline=auto"
    assert refusal(**_inline(79, strict=True)) == f"strict is set and {NO_INLINE} 79; {allowed}"
    assert f"{NO_INLINE} 70)" in startup_line(build(**_inline(200, long_prefill_token_threshold=70)))


def test_up_to_which_length_prompts_are_stored_inline_is_said_where_not_all_are(build):
    assert "64 tokens kept, inline up to 80 tokens)" in startup_line(build(**_inline(80)))
    assert "64 tokens kept)" in startup_line(build(**_inline(256)))


def test_a_server_none_of_whose_prompts_is_long_enough_says_so(build):
    line = "which no prompt of up to 256 tokens is long enough for, unless it brings its own kv_budget_tokens"
    assert f"at least 544 tokens kept, {line})" in startup_line(build(**_options()))
    assert line in startup_line(build(**_options(keep_ratio=1.0, min_tokens=52), block_size=16))
    assert line not in startup_line(build(**_options(min_tokens=52), block_size=16))


@pytest.mark.parametrize(
    ("flag", "fields"),
    [
        ("--enable-lora", {"enable_lora": True}),
        ("--speculative-config", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}),
    ],
)
def test_loras_and_speculation_are_refused_by_name_and_without_the_int8_cache_nothing_is_pruned(
    build, refusal, flag, fields
):
    assert refusal(**_options(), **fields).startswith(f"{flag} does not work with the int8 KV cache of kvcompile; ")
    options = _options()
    options["additional_config"]["kvcompile"]["kv8"] = {"enabled": False}
    config = build(**options, **fields)
    assert "prune (attention is not kvcompile's)" in startup_line(config).partition("not active")[2]
    assert config.parallel_config.worker_cls == STOCK_WORKER


def test_a_model_that_pools_is_refused_by_name(refusal):
    assert "has a pooling runner, which is not supported" in refusal(**_options(), runner="pooling")


def test_a_method_that_needs_output_projections_is_refused_where_they_are_quantised_in_an_unknown_way():
    config = SimpleNamespace(quant_config=None)
    prune_preset._refuse_unknown_projections(config)
    config.quant_config = W4A8Config({256: 128})
    prune_preset._refuse_unknown_projections(config)
    config.quant_config = SimpleNamespace(get_name=lambda: "fp8")
    with pytest.raises(UsageError, match="the quantization of this model is fp8; choose another prune.method"):
        prune_preset._refuse_unknown_projections(config)


def test_a_request_that_asks_for_a_budget_where_nothing_is_pruned_is_refused(build):
    params = SimpleNamespace(extra_args={"kv_budget_tokens": 600}, prompt_logprobs=None)
    with pytest.raises(ValueError, match="kv_budget_tokens is 600 and this server does not prune; leave it out"):
        prune_request.refuse_wrong(build(**OFF), params)
    prune_request.refuse_wrong(build(**_options()), params)
    prune_request.refuse_wrong(build(**OFF), SimpleNamespace(extra_args={"kv_prune": False}))
    prune_request.refuse_wrong(build(**OFF), SimpleNamespace(extra_args=None))
    with pytest.raises(ValueError, match="kv_prune is True and this server does not prune; leave it out"):
        prune_request.refuse_wrong(build(**OFF), SimpleNamespace(extra_args={"kv_prune": True}, prompt_logprobs=None))
    params.prompt_logprobs = 0
    with pytest.raises(ValueError, match="kv_budget_tokens is 600 and prompt_logprobs are asked for"):
        prune_request.refuse_wrong(build(**_options()), params)


def test_the_state_names_a_worker_that_is_not_ours(build):
    config = build(**_options())
    config.parallel_config.worker_cls = "a.Worker"
    assert "prune (worker a.Worker)" in report.startup_line(config, {})
