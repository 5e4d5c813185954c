"""config.json of SRC, as both commands that make a checkpoint judge it: before anything is written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.tools import qserve_sources, quantize_sources

from kvcompile import cli

KINDS = {"quantize": "a Hugging Face checkpoint", "import-qserve": "a QServe checkpoint"}


@pytest.fixture(params=KINDS)
def command(request):
    return request.param


@pytest.fixture(scope="module")
def published():
    torch.manual_seed(0)
    return qserve_sources.published()


@pytest.fixture
def source(command, tmp_path, published):
    """`source(**changes of config.json)`: a checkpoint folder."""

    def write(**changes) -> Path:
        if command == "quantize":
            return quantize_sources.write(tmp_path / "s", **changes)
        return qserve_sources.write(tmp_path / "s", published, **changes)

    return write


def _refused(capsys, command, *arguments):
    before = sorted(arguments[0].parent.iterdir())
    assert cli.main([command, *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    assert sorted(arguments[0].parent.iterdir()) == before
    return err.removeprefix("kvcompile: error: ").rstrip("\n")


def test_a_folder_that_does_not_exist_is_said_not_to(command, tmp_path, capsys):
    assert _refused(capsys, command, tmp_path / "nope", tmp_path / "o") == (
        f"SRC {tmp_path / 'nope'}: no such folder; give the folder of {KINDS[command]}"
    )


def test_a_file_is_said_to_be_one(command, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert _refused(capsys, command, tmp_path / "file", tmp_path / "o") == (
        f"SRC {tmp_path / 'file'}: is a file; give the folder of {KINDS[command]}"
    )


def test_a_folder_without_a_configuration_is_said_to_have_none(command, tmp_path, capsys):
    (tmp_path / "s").mkdir()
    assert _refused(capsys, command, tmp_path / "s", tmp_path / "o") == (
        f"SRC {tmp_path / 's'}: the folder has no config.json; give that of {KINDS[command]}"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "holds no JSON object; get the checkpoint again"),
        (
            "{",
            "cannot be read as JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)); get",
        ),
        ("[" * 100_000, "cannot be read as JSON (it is nested too deeply); get the checkpoint again"),
        # Python reads it, but neither copies nor writes it.
        (
            f'{{"a": {"[" * 900}{"]" * 900}}}',
            "cannot be read as JSON (it is nested too deeply); get the checkpoint again",
        ),
    ],
    ids=["a list", "broken", "too deep to be read", "too deep to be written"],
)
def test_a_file_that_is_no_json_object_is_refused_with_what_to_do(command, source, tmp_path, capsys, text, said):
    folder = source()
    (folder / "config.json").write_text(text)
    assert _refused(capsys, command, folder, tmp_path / "o").startswith(f"{folder / 'config.json'} {said}")


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ("LlamaForCausalLM", "'LlamaForCausalLM'"),
        (None, "none"),
        ([], "[]"),
        (["GPT2LMHeadModel"], "['GPT2LMHeadModel']"),
        ([["LlamaForCausalLM"]], "[['LlamaForCausalLM']]"),
    ],
)
def test_other_architectures_are_shown_as_they_are(command, source, tmp_path, capsys, names, shown):
    folder = source(architectures=names)
    assert _refused(capsys, command, folder, tmp_path / "o").startswith(
        f"{folder / 'config.json'}: architectures is {shown}; allowed is a list of one of LlamaForCausalLM, Mistral"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; allowed is silu; correct it"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; allowed is a finite decimal number from 0, such as"),
        ({"rope_theta": 0}, "rope_theta is 0; allowed is a number above 0; correct it"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; allowed is null and a table with a rope_type (default"),
        ({"use_cache": "yes"}, "use_cache is 'yes'; allowed is true or false; correct it"),
    ],
)
def test_values_that_would_make_out_unusable_are_refused_with_and_without_a_text(
    command, source, tmp_path, capsys, changes, said
):
    folder = source(**changes)
    (tmp_path / "long.txt").write_text("long " * 200)
    for more in ((), ("--calibration", tmp_path / "long.txt"))[: 2 if command == "quantize" else 1]:
        assert _refused(capsys, command, folder, tmp_path / "o", *more).startswith(f"{folder / 'config.json'}: {said}")


def test_nothing_of_transformers_own_precedes_the_line(command, source, tmp_path):
    """It logs to the standard error that it found at its import."""
    folder = source(rope_scaling={"type": "linear", "factor": "x"})
    arguments = [sys.executable, "-m", "kvcompile.cli", command, str(folder), str(tmp_path / "o")]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"kvcompile: error: {folder / 'config.json'}: rope_scaling.factor is 'x'; allowed is a number above 0; correct "
        "it\n"
    )


def test_half_a_character_is_written_as_it_was_read(command, source, tmp_path):
    changes = {"_name_or_path": "\ud800", "task_specific_params": {"\udfff": ["ä\ud800"]}}
    folder = source(**changes)
    assert cli.main([command, str(folder), str(tmp_path / "o")]) == 0
    made = json.loads((tmp_path / "o/config.json").read_text(encoding="utf-8"))
    assert {key: made[key] for key in changes} == changes


def test_nesting_that_can_be_copied_is_written(command, source, tmp_path):
    deep = json.loads("[" * 100 + "]" * 100)
    folder = source(task_specific_params={"deep": deep})
    assert cli.main([command, str(folder), str(tmp_path / "o")]) == 0
    assert json.loads((tmp_path / "o/config.json").read_text())["task_specific_params"] == {"deep": deep}


@pytest.mark.parametrize(
    ("described", "shown"),
    [
        ("awq", "awq"),
        ({"quant_method": "awq"}, "awq"),
        ({"bits": 4}, "{'bits': 4}"),
        (["awq", 4], "['awq', 4]"),
        ({"quant_method": None}, "{'quant_method': None}"),
    ],
)
def test_how_it_is_quantised_is_shown_as_it_is_described(command, source, tmp_path, capsys, described, shown):
    folder = source(quantization_config=described)
    told = {
        "quantize": f"is quantised already (quantization_config: {shown}); give the original checkpoint",
        "import-qserve": f"quantization_config is of {shown}, not of QServe; give a checkpoint of QServe",
    }
    assert _refused(capsys, command, folder, tmp_path / "o") == f"SRC {folder}: {told[command]}"
