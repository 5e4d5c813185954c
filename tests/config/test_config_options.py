"""What each option accepts. The cases come from the dataclasses, so a new option is covered without an edit here."""

import dataclasses
import math
import subprocess
import sys

import pytest

from kvcompile.config import (
    OPTIONS,
    SECTIONS,
    KVCompileConfig,
    OffloadConfig,
    PruneConfig,
    UsageError,
    describe,
    resolve,
)
from kvcompile.ops.prune import METHODS

NUMERIC = [option for option in OPTIONS.values() if option.kind in (int, float)]
WRONG_TYPES = {
    bool: (1, 0, "true", None, 1.0, [True]),
    int: (True, 1.0, "1", [1], {"a": 1}),
    float: (False, "0.5", None, [0.5]),
    str: (1, True, None, ["auto"]),
}
# The three prune counts depend on each other; these companions leave every one of them its full range.
COMPANIONS = {"prune": {"sink_tokens": 0, "window_tokens": 1, "min_tokens": OPTIONS["prune.min_tokens"].high}}


def _make(option, value):
    """A section (or the whole configuration) with one option set."""
    section, _, name = option.key.rpartition(".")
    if not section:
        return KVCompileConfig(**{name: value})
    return SECTIONS[section](**{**COMPANIONS.get(section, {}), name: value})


def _value(option, value):
    return getattr(_make(option, value), option.key.rpartition(".")[2])


def _refused(option, value):
    with pytest.raises(UsageError) as caught:
        _make(option, value)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{option.key} is "), message
    assert f"give {option.allowed}, or leave it out for " in message
    return message


def _lowest(option):
    if option.above is not None:
        return math.nextafter(option.above, math.inf) if option.kind is float else option.above + 1
    return option.low


def _below(option):
    if option.above is not None:
        return option.above
    return math.nextafter(option.low, -math.inf) if option.kind is float else option.low - 1


def _ids(options):
    return [option.key for option in options]


@pytest.mark.parametrize("option", NUMERIC, ids=_ids(NUMERIC))
def test_a_numeric_option_has_both_bounds(option):
    assert (option.low is None) != (option.above is None)
    assert option.high is not None


@pytest.mark.parametrize("option", NUMERIC, ids=_ids(NUMERIC))
def test_the_lowest_allowed_value_is_accepted_and_the_next_below_refused(option):
    assert _value(option, _lowest(option)) == _lowest(option)
    _refused(option, _below(option))


@pytest.mark.parametrize("option", NUMERIC, ids=_ids(NUMERIC))
def test_the_highest_allowed_value_is_accepted_and_the_next_above_refused(option):
    assert _value(option, option.high) == option.high
    over = math.nextafter(option.high, math.inf) if option.kind is float else option.high + 1
    _refused(option, over)


@pytest.mark.parametrize("option", OPTIONS.values(), ids=_ids(OPTIONS.values()))
def test_a_value_of_another_type_is_refused(option):
    for value in WRONG_TYPES[option.kind]:
        if value is None and option.optional:
            continue
        _refused(option, value)


@pytest.mark.parametrize("option", OPTIONS.values(), ids=_ids(OPTIONS.values()))
def test_none_is_accepted_by_optional_options_alone(option):
    if option.optional:
        assert _value(option, None) is None
    else:
        _refused(option, None)


FLOATS = [option for option in NUMERIC if option.kind is float]


@pytest.mark.parametrize("option", FLOATS, ids=_ids(FLOATS))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400])
def test_a_number_that_is_not_finite_is_refused(option, value):
    _refused(option, value)


@pytest.mark.parametrize("option", FLOATS, ids=_ids(FLOATS))
def test_an_int_given_for_a_float_is_stored_as_a_float(option):
    value = _value(option, 1)
    assert value == 1.0
    assert type(value) is float


def test_negative_zero_is_stored_as_zero():
    assert math.copysign(1, OffloadConfig(lazy_gpu_free_trigger=-0.0).lazy_gpu_free_trigger) == 1


CHOICES = [option for option in OPTIONS.values() if option.choices]


@pytest.mark.parametrize("option", CHOICES, ids=_ids(CHOICES))
def test_every_choice_is_accepted_and_any_other_word_refused(option):
    for choice in option.choices:
        assert _value(option, choice) == choice
    for word in ("", option.choices[0].upper(), option.choices[0] + " ", "nonesuch"):
        assert ", ".join(option.choices) in _refused(option, word)


def test_a_text_option_always_lists_its_choices():
    assert [option.key for option in OPTIONS.values() if option.kind is str and not option.choices] == []


def test_the_choices_and_defaults_are_those_of_the_design():
    assert {key: option.default for key, option in OPTIONS.items()} == {
        "kv8.enabled": True,
        "linear.enabled": True,
        "linear.lm_head_int8": "auto",
        "passes.norm_quant": True,
        "passes.swiglu_quant": True,
        "passes.rotary": True,
        "passes.attention_swap": True,
        "prune.enabled": True,
        "prune.method": "robust",
        "prune.keep_ratio": 0.5,
        "prune.min_tokens": 544,
        "prune.budget_tokens": None,
        "prune.window_tokens": 32,
        "prune.sink_tokens": 4,
        "prune.inline": "auto",
        "scheduler.enabled": True,
        "scheduler.max_wait_batches": 2,
        "scheduler.horizon_steps": 32,
        "scheduler.reserve_ratio": 0.01,
        "offload.enabled": False,
        "offload.cpu_bytes_to_use": 4 * 1024**3,
        "offload.lazy_gpu_free_trigger": 0.35,
        "offload.max_scan_reqs": 3,
        "strict": False,
    }
    assert OPTIONS["prune.method"].choices[0] == "robust"
    assert set(OPTIONS["prune.method"].choices) == set(METHODS)
    assert OPTIONS["prune.inline"].choices == ("auto", "always", "never")


def test_a_range_error_names_the_key_the_value_the_range_and_what_to_do():
    with pytest.raises(UsageError) as caught:
        PruneConfig(keep_ratio=1.5)
    assert str(caught.value) == (
        "prune.keep_ratio is 1.5: give a number, 0 < value <= 1, or leave it out for the default 0.5"
    )


def test_a_type_error_says_that_text_was_given():
    with pytest.raises(UsageError) as caught:
        PruneConfig(keep_ratio="0.5")
    assert str(caught.value) == (
        "prune.keep_ratio is '0.5' (a string): give a number, 0 < value <= 1, or leave it out for the default 0.5"
    )


def test_a_very_long_value_does_not_flood_the_message():
    assert len(_refused(OPTIONS["prune.method"], "x\n" * 10_000)) < 300
    assert len(_refused(OPTIONS["prune.min_tokens"], 16**10_000)) < 300


@pytest.mark.parametrize("name", ["min_tokens", "budget_tokens"])
def test_a_budget_that_every_block_makes_too_small_is_refused_with_what_each_size_needs(name):
    with pytest.raises(UsageError) as caught:
        resolve(environ={}, overrides={f"prune.{name}": 51})
    assert str(caught.value) == (
        f"prune.{name} is 51, less than prune.sink_tokens + prune.window_tokens + a block: 52 with 16, 68 with 32, "
        "100 with 64, 164 with 128 tokens a block: give "
        f"prune.{name} at least that, or lower prune.window_tokens or prune.sink_tokens "
        f"(prune.{name} is from --additional-config)"
    )
    assert resolve(environ={}, overrides={f"prune.{name}": 52}).sources
    assert resolve(environ={}, overrides={f"prune.{name}": 51}, judge_budget=False).sources


@pytest.mark.parametrize(("given", "least"), [({"window_tokens": 600}, 620), ({"sink_tokens": 500}, 548)])
def test_a_larger_window_or_sink_needs_a_larger_minimum(given, least):
    with pytest.raises(UsageError, match=f"prune.min_tokens is 544, less than .* = {least}: "):
        PruneConfig(**given).refuse_small_budget(16)
    PruneConfig(min_tokens=least, **given).refuse_small_budget(16)


def test_a_budget_is_judged_by_the_size_of_a_block_too_and_the_minimum_only_where_it_decides():
    with pytest.raises(UsageError) as caught:
        PruneConfig(budget_tokens=100).refuse_small_budget(128)
    assert str(caught.value) == (
        "prune.budget_tokens is 100, less than prune.sink_tokens + prune.window_tokens + 128 = 164: give "
        "prune.budget_tokens at least 164, or lower prune.window_tokens or prune.sink_tokens or --block-size"
    )
    PruneConfig(budget_tokens=164, min_tokens=52).refuse_small_budget(128)
    with pytest.raises(UsageError, match="prune.min_tokens is 52, less than .* = 164: "):
        PruneConfig(min_tokens=52).refuse_small_budget(128)


def test_the_configuration_is_frozen_and_hashable():
    config = KVCompileConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.strict = True
    assert hash(config) == hash(KVCompileConfig())


def test_replace_validates_again():
    with pytest.raises(UsageError, match="prune.keep_ratio is 0"):
        dataclasses.replace(PruneConfig(), keep_ratio=0)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_of_another_class_is_refused(section):
    with pytest.raises(UsageError, match=f"^{section} is true: give a {SECTIONS[section].__name__}$"):
        KVCompileConfig(**{section: True})


def test_a_usage_error_is_a_value_error():
    assert issubclass(UsageError, ValueError)


def test_describe_lists_every_option_with_a_one_line_text():
    rows = describe()
    assert [row[0] for row in rows] == list(OPTIONS)
    for key, default, allowed, doc in rows:
        assert default == OPTIONS[key].default
        assert allowed == OPTIONS[key].allowed
        assert doc
        assert "\n" not in doc


def test_describe_gives_the_allowed_values_in_words():
    allowed = {row.key: row.allowed for row in describe()}
    assert allowed["strict"] == "true or false"
    assert allowed["prune.keep_ratio"] == "a number, 0 < value <= 1"
    assert allowed["prune.inline"] == "one of auto, always, never"
    assert allowed["prune.budget_tokens"] == "a whole number, 17 <= value <= 2147483647, or none"
    assert allowed["offload.cpu_bytes_to_use"] == (
        "bytes as a whole number or with a unit such as 8GiB (KiB, MiB, GiB, TiB), 1MiB <= value <= 1024TiB"
    )


def test_the_configuration_needs_the_standard_library_alone():
    code = (
        "import sys; import kvcompile.config; "
        "print(sorted(set(m.split('.')[0] for m in sys.modules) - set(sys.stdlib_module_names)))"
    )
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert loaded == "['__main__', 'kvcompile']" or loaded == "['kvcompile']"
