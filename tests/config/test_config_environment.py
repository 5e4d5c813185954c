"""All environment variables of ours that are wrong, and why: not the first alone."""

import pytest

from kvcompile.config_environment import without, wrong_variables

DISAGREE = (
    "KVCOMPILE_PRUNE_BUDGET_TOKENS is 600 but VLLM_ANDPRO_BUDGET_TOKENS, another name of prune.budget_tokens, is "
)


@pytest.mark.parametrize(
    ("environ", "lines"),
    [
        ({}, {}),
        ({"KVCOMPILE_STRICT": "1", "VLLM_ANDPRO_BUDGET_TOKENS": "600", "KVCOMPILE_CACHE_DIR": "?", "PATH": ""}, {}),
        ({"KVCOMPILE_STRICT": "maybe"}, {"KVCOMPILE_STRICT": "strict is 'maybe': give one of 1, true"}),
        ({"KVCOMPILE_STRIKT": "1"}, {"KVCOMPILE_STRIKT": "unknown variable 'KVCOMPILE_STRIKT': did you mean "}),
        ({"VLLM_ANDPRO_BUDGET_TOKENS": "0"}, {"VLLM_ANDPRO_BUDGET_TOKENS": "prune.budget_tokens is 0: give a whole"}),
        ({"KVCOMPILE_CONFIG": "/no.toml"}, {"KVCOMPILE_CONFIG": "file /no.toml: cannot be read (No such file or di"}),
        (
            {"KVCOMPILE_KV8_ENABLED": "2", "KVCOMPILE_PRUNE_WINDOW_TOKENS": "600"},
            {
                "KVCOMPILE_KV8_ENABLED": "kv8.enabled is '2': give one of 1, true",
                "KVCOMPILE_PRUNE_WINDOW_TOKENS": "prune.min_tokens is 544, less than prune.sink_tokens + ",
            },
        ),
        ({"KVCOMPILE_PRUNE_WINDOW_TOKENS": "600", "KVCOMPILE_PRUNE_MIN_TOKENS": "700"}, {}),
        (
            {"KVCOMPILE_PRUNE_BUDGET_TOKENS": "600", "VLLM_ANDPRO_BUDGET_TOKENS": "601"},
            {"KVCOMPILE_PRUNE_BUDGET_TOKENS": DISAGREE, "VLLM_ANDPRO_BUDGET_TOKENS": DISAGREE},
        ),
    ],
)
def test_those_that_are_wrong_alone_and_those_that_disagree_are_told(environ, lines):
    found = wrong_variables(environ)
    assert found.keys() == lines.keys()
    assert all(found[name].startswith(line) and "\n" not in found[name] for name, line in lines.items())
    assert wrong_variables(without(environ, found)) == {}


def test_a_file_that_is_wrong_makes_its_variable_wrong(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("prune.keep_ratio = 7\n")
    assert wrong_variables({"KVCOMPILE_CONFIG": str(file)}) == {
        "KVCOMPILE_CONFIG": f"file {file}: prune.keep_ratio is 7: give a number, 0 < value <= 1, or leave it out for "
        "the default 0.5"
    }
