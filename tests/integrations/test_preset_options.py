"""kvcompile's own options: where they come from, what is refused, and vLLM's refusals in the same one line."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kvcompile import presets
from kvcompile.config import UsageError, resolve, to_dict
from kvcompile.integrations.vllm import report
from kvcompile.integrations.vllm.active import is_active
from kvcompile.integrations.vllm.inductor_pass import PASS_KEY
from kvcompile.integrations.vllm.request import Request


def _options(**changes: Any) -> dict[str, Any]:
    return {"kvcompile": changes}


def _resolved(changes: dict[str, Any]) -> dict[str, Any]:
    return to_dict(resolve(overrides=changes, environ={}).config)


def test_options_come_from_the_request(build):
    asked = Request({}, {"strict": True, "passes": {"norm_quant": False}}).compilation_config()
    config = build(compilation_config=asked)
    assert config.additional_config["kvcompile"] == _resolved({"strict": True, "passes.norm_quant": False})
    assert config.compilation_config.inductor_compile_config[PASS_KEY]._config == config.additional_config["kvcompile"]


def test_options_come_from_the_environment(build, monkeypatch):
    monkeypatch.setenv("KVCOMPILE_STRICT", "on")
    assert build().additional_config["kvcompile"] == _resolved({"strict": True})


@pytest.mark.parametrize(
    ("name", "text"), [("kv.toml", "strict = true\n"), ("kv.json", json.dumps({"strict": True}))], ids=["toml", "json"]
)
def test_options_come_from_a_file(build, monkeypatch, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    monkeypatch.setenv("KVCOMPILE_CONFIG", str(tmp_path / name))
    assert build().additional_config["kvcompile"] == _resolved({"strict": True})


@pytest.mark.parametrize("by_flag", [True, False], ids=["additional_config", "compilation_config"])
def test_a_flag_wins_over_the_environment_and_the_environment_over_a_file(build, monkeypatch, tmp_path, by_flag):
    (tmp_path / "kv.toml").write_text("strict = true\n[kv8]\nenabled = false\n[passes]\nswiglu_quant = false\n")
    monkeypatch.setenv("KVCOMPILE_CONFIG", str(tmp_path / "kv.toml"))
    monkeypatch.setenv("KVCOMPILE_KV8_ENABLED", "true")
    monkeypatch.setenv("KVCOMPILE_STRICT", "true")
    options = {"strict": False}
    given = {"additional_config": {"kvcompile": options}}
    if not by_flag:
        given = {"compilation_config": Request({}, options).compilation_config()}
    config = build(**given)
    assert config.additional_config["kvcompile"] == _resolved({"passes.swiglu_quant": False})


def test_options_in_two_flags_are_refused(refusal):
    asked = Request({}, {"strict": True}).compilation_config()
    line = refusal(compilation_config=asked, additional_config=_options(strict=True))
    assert line == (
        'kvcompile\'s options are given twice, in --additional-config "kvcompile" and in --compilation-config '
        '"kvcompile"; give them in one place'
    )


@pytest.mark.parametrize("value", [True, 3, "strict", ["strict"], None], ids=repr)
def test_options_that_are_no_table_are_refused(refusal, value):
    line = refusal(additional_config={"kvcompile": value})
    assert line == f'--additional-config "kvcompile" is {value!r}; allowed is a table of kvcompile\'s keys'


WRONG = {
    "kv8.enable": (True, "unknown key 'kv8.enable': did you mean kv8.enabled?"),
    "strict": (1, "strict is 1: give true or false"),
    "scheduler.horizon_steps": (0, "scheduler.horizon_steps is 0: give a whole number, 1 <= value <= 65536"),
    "offload.lazy_gpu_free_trigger": (1.5, "offload.lazy_gpu_free_trigger is 1.5: give a number, 0 <= value <= 1"),
}


@pytest.mark.parametrize(("key", "value", "says"), [(k, *v) for k, v in WRONG.items()], ids=WRONG)
@pytest.mark.parametrize("flag", ["--additional-config", "--compilation-config"])
def test_a_wrong_option_is_refused_with_its_key_its_range_and_the_flag_that_gave_it(refusal, flag, key, value, says):
    if flag == "--additional-config":
        line = refusal(additional_config={"kvcompile": {key: value}})
    else:
        line = refusal(compilation_config=Request({}, {key: value}).compilation_config())
    assert line.startswith(f"{flag}: {says}")


MISSING = {
    "offload.enabled": (True, "host offload of preempted requests"),
    "offload.cpu_bytes_to_use": (1 << 30, "host offload of preempted requests"),
}


@pytest.fixture
def no_offload(monkeypatch):
    """As if this version had no such part."""
    parts = tuple(replace(m, available=False) if m.name == "offload" else m for m in presets.MODULES)
    monkeypatch.setattr(presets, "MODULES", parts)


@pytest.mark.parametrize(("key", "value", "what"), [(k, *v) for k, v in MISSING.items()], ids=MISSING)
def test_an_option_of_a_part_that_this_version_does_not_have_is_refused_with_its_source(
    refusal, no_offload, monkeypatch, tmp_path, key, value, what
):
    section, _, name = key.partition(".")
    rest = f"{what} is not in this version of kvcompile; remove the key or set {section}.enabled=false"
    given = {"kvcompile": {section: {name: value}}}
    assert refusal(additional_config=given) == f"{key} (from --additional-config): {rest}"
    asked = Request({}, {key: value}).compilation_config()
    assert refusal(compilation_config=asked) == f"{key} (from --compilation-config): {rest}"
    (tmp_path / "kv.json").write_text(json.dumps({key: value}))
    monkeypatch.setenv("KVCOMPILE_CONFIG", str(tmp_path / "kv.json"))
    assert refusal() == f"{key} (from file {tmp_path / 'kv.json'}): {rest}"
    monkeypatch.delenv("KVCOMPILE_CONFIG")
    variable = f"KVCOMPILE_{section}_{name}".upper()
    monkeypatch.setenv(variable, str(value))
    assert refusal() == f"{key} (from environment {variable}): {rest}"


def test_switching_a_missing_part_off_is_accepted(build, no_offload):
    config = build(additional_config=_options(offload={"enabled": False}))
    assert config.additional_config["kvcompile"] == _resolved({"offload.enabled": False})


def test_a_table_of_options_without_the_request_is_refused(engine_args):
    with pytest.raises(UsageError) as caught:
        engine_args(additional_config=_options(strict=True)).create_engine_config()
    assert str(caught.value) == (
        '--additional-config has a "kvcompile" table but kvcompile is not asked for; add --compilation-config '
        "kvcompile, or remove the table"
    )


def test_options_in_the_environment_without_the_request_are_ignored(engine_args, monkeypatch):
    monkeypatch.setenv("KVCOMPILE_STRICT", "on")
    config = engine_args().create_engine_config()
    assert not is_active(config)
    assert config.additional_config == {}


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"attention_backend": "bogus"}, "--attention-backend bogus: Unknown attention backend: 'BOGUS'"),
        (
            {"attention_backend": "FLASH_ATTN", "attention_config": {"backend": "FLASH_ATTN"}},
            "vLLM refused: attention_backend and attention_config.backend are mutually exclusive",
        ),
        ({"kv_cache_dtype": "bogus"}, "vLLM refused: 1 validation error for CacheConfig cache_dtype Input should be"),
        ({"max_model_len": 10_000}, "vLLM refused: 1 validation error for ModelConfig"),
        ({"max_num_partial_prefills": 2}, "vLLM refused: Concurrent Partial Prefill is not supported"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_vllm_refuses_is_one_line_too(refusal, fields, part):
    assert part in refusal(**fields)


def test_the_whole_story_of_a_refusal_by_vllm_stays_attached(build, llama):
    with pytest.raises(UsageError, match=f"^model {llama}: vLLM refused: ") as caught:
        build(kv_cache_dtype="bogus")
    assert type(caught.value.__cause__).__name__ == "ValidationError"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"enforce_eager": True}, "passes is not active: --enforce-eager: nothing is compiled"),
        ({"kv_cache_dtype": "bfloat16"}, "kv8 is not active: --kv-cache-dtype bfloat16 given"),
    ],
)
def test_in_strict_mode_a_part_that_cannot_take_effect_is_refused(refusal, fields, why):
    line = refusal(additional_config={"kvcompile": {"strict": True}}, **fields)
    assert line == f"strict is set and {why}; remove what is in its way, or strict"


def test_in_strict_mode_a_part_that_the_user_switched_off_is_fine(build):
    config = build(additional_config={"kvcompile": {"strict": True, "kv8": {"enabled": False}}})
    assert config.cache_config.cache_dtype == "auto"


def test_in_strict_mode_it_is_the_option_that_tells_switched_off_not_the_words_of_the_reason(build, monkeypatch):
    monkeypatch.setattr(report, "why_not", lambda config, notes: {"kv8": "in other words"})
    build(additional_config={"kvcompile": {"strict": True, "kv8": {"enabled": False}}})


def test_in_strict_mode_a_reason_that_reads_like_switched_off_does_not_excuse_a_part_that_is_on(refusal, monkeypatch):
    monkeypatch.setattr(report, "why_not", lambda config, notes: {"kv8": "kv8.enabled=false"})
    line = refusal(additional_config={"kvcompile": {"strict": True}})
    assert line.startswith("strict is set and kv8 is not active: kv8.enabled=false; ")


def test_in_strict_mode_a_part_that_was_switched_off_does_not_excuse_another(refusal):
    asked = {"kvcompile": {"strict": True, "kv8": {"enabled": False}}}
    line = refusal(additional_config=asked, enforce_eager=True)
    assert line.startswith("strict is set and passes is not active: --enforce-eager: nothing is compiled; ")
