"""What `kvcompile quantize` refuses: one line, exit code 2, nothing left behind."""

import json
import subprocess
import sys

import pytest
import torch
from tests.tools import quantize_sources as sources

from kvcompile import cli


@pytest.mark.parametrize(
    ("out", "told"),
    [
        ("taken", "taken exists"),
        ("taken-file", "taken-file exists"),
        ("dangling", "dangling exists"),
        ("no/where", "no does not exist"),
        ("s/inside", "lie one in the other"),
        ("loop/o", "loop: Too many levels of symbolic links; name another folder"),
        ("loop", "loop exists"),
        ("~nosuchuser/o", "OUT ~nosuchuser/o: Could not determine home directory.; give the folder's full path"),
        (f"{'x' * 300}/o", "x: File name too long; name another folder"),
        ("x" * 300, "x.part: File name too long; name another folder"),
        ("x" * 252, "x.part: File name too long; name another folder"),
        ("in-the-way", "in-the-way.part is in the way"),
        ("linked", "linked.part is in the way"),
        ("foreign", "foreign.part is not of a run"),
        (".", "lie one in the other"),
    ],
)
def test_places_that_cannot_become_out_are_refused(tmp_path, capsys, out, told):
    source = sources.write(tmp_path / "s")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken-file").write_text("x")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "in-the-way.part").write_text("x")
    (tmp_path / "linked.part").symlink_to("taken")
    (tmp_path / "foreign.part").mkdir()
    (tmp_path / "foreign.part" / "mine.txt").write_text("x")
    place = out if out.startswith("~") else tmp_path / out
    assert told in sources.refused(tmp_path, capsys, source, place)
    assert (tmp_path / "foreign.part" / "mine.txt").read_text() == "x"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("loop", "SRC {}/loop: Too many levels of symbolic links; name another folder"),
        ("x" * 300, "x: File name too long; name another folder"),
        ("~nosuchuser", "SRC ~nosuchuser: Could not determine home directory.; give the folder's full path"),
        ("file/s", "s: no such folder"),
    ],
)
def test_places_that_the_system_cannot_follow_are_no_source(tmp_path, capsys, source, told):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("x")
    place = source if source.startswith("~") else tmp_path / source
    assert told.format(tmp_path) in sources.refused(tmp_path, capsys, place, tmp_path / "o")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--method", "gptq"], "give --calibration FILE"),
        (["--method", "rtn", "--calibration", "long.txt"], "--calibration has no use in --method rtn"),
        (["--calibration-tokens", "4096"], "--calibration-tokens has no use in --method search"),
        (["--calibration", "long.txt", "--calibration-tokens", "511"], "allowed is 512 or more"),
        (["--calibration", "short.txt"], "short.txt holds 5 tokens; at least 512"),
        (["--calibration", "none.txt"], "none.txt cannot be read"),
        (["--calibration", "binary.txt"], "binary.txt cannot be read as UTF-8 text"),
        (["--perplexity", "short.txt"], "short.txt holds 5 tokens; at least 512"),
        (["--perplexity", "none.txt"], "none.txt cannot be read"),
        (["--perplexity", "."], "Is a directory: '.'; give a plain text file"),
        (["--calibration", "."], "--calibration . cannot be read: Is a directory; give a plain text file"),
    ],
)
def test_arguments_that_cannot_be_followed_are_refused(tmp_path, capsys, monkeypatch, arguments, told):
    source = sources.write(tmp_path / "s")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "long.txt").write_text("long " * 200)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe" * 600)
    monkeypatch.chdir(tmp_path)
    assert told in sources.refused(tmp_path, capsys, source, tmp_path / "o", *arguments)


@pytest.mark.parametrize("argument", ["--perplexity", "--calibration"])
def test_a_tokenizer_of_more_ids_than_the_model_has_is_refused(tmp_path, capsys, argument):
    state = sources.tensors()
    state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"][:80]
    source = sources.write(tmp_path / "s", state, vocab_size=80)
    (tmp_path / "long.txt").write_text("long " * 200)
    assert sources.refused(tmp_path, capsys, source, tmp_path / "o", argument, tmp_path / "long.txt") == (
        f"kvcompile: error: {argument}: the tokenizer of {source} gives the id 220; by vocab_size in config.json the "
        "model has 0 to 79; the two do not belong together, get the checkpoint again\n"
    )


@pytest.mark.parametrize("argument", ["--perplexity", "--calibration"])
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"tokenizer.json": None, "tokenizer_config.json": None},
            "Couldn't instantiate the backend tokenizer from one of",
        ),
        ({"tokenizer.json": "{}"}, "KeyError: 'added_tokens'"),
        ({"tokenizer.json": '{"model":'}, "Expecting value: line 1 column 10 (char 9)"),
        ({"tokenizer_config.json": "[1]"}, "TypeError: list indices must be integers or slices, not str"),
        (
            {"tokenizer_config.json": '{"tokenizer_class": "Nope", "auto_map": {"AutoTokenizer": ["x.Y", null]}}'},
            "The repository ",
        ),
        (
            {"tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "\\ud800"}'},
            "'utf-8' codec can't encode character '\\ud800' in position 0: surrogates not allowed",
        ),
    ],
    ids=["none", "empty", "cut off", "a list", "of its own code", "half a character"],
)
def test_a_tokenizer_that_does_not_work_is_one_whole_line_with_what_to_do(tmp_path, capsys, argument, changes, why):
    source = sources.write(tmp_path / "s")
    (tmp_path / "long.txt").write_text("long " * 200)
    for name, text in changes.items():
        (source / name).unlink()
        if text is not None:
            (source / name).write_text(text)
    line = sources.refused(tmp_path, capsys, source, tmp_path / "o", argument, tmp_path / "long.txt")
    assert line.startswith(f"kvcompile: error: {argument}: the tokenizer of {source} cannot be loaded ({why}")
    assert line.endswith(
        "); copy the tokenizer files of the original checkpoint into it (tokenizer.json, tokenizer_config.json, ...)\n"
    )


@pytest.mark.parametrize("argument", ["--perplexity", "--calibration"])
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        # vLLM serves a Mistral with biases, transformers does not know of any.
        (
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "attention_bias": True},
            "model.layers.0.self_attn.k_proj.bias has shape [64], by config.json it has none",
        ),
        # It takes this configuration, but makes no model with it.
        ({"pad_token_id": 5000}, "config.json: transformers makes no model of it (AssertionError: Padding_idx must"),
    ],
)
def test_what_transformers_makes_no_model_of_cannot_be_run(tmp_path, capsys, changes, told, argument):
    state = sources.tensors(bias=True) if "attention_bias" in changes else sources.tensors()
    for layer in range(sources.LAYERS if "attention_bias" in changes else 0):
        state[f"model.layers.{layer}.self_attn.o_proj.bias"] = torch.zeros(sources.HIDDEN)
    source = sources.write(tmp_path / "s", state, **changes)
    (tmp_path / "long.txt").write_text("long " * 200)
    assert told in sources.refused(tmp_path, capsys, source, tmp_path / "o", argument, tmp_path / "long.txt")


@pytest.mark.parametrize(("pad", "code"), [(5000, 2), (-5, 0)], ids=["refused", "taken"])
def test_what_transformers_logs_is_told_only_if_all_goes_well(tmp_path, pad, code):
    """In a process of its own: transformers logs to the standard error that it found at its import."""
    source = sources.write(tmp_path / "s", pad_token_id=pad)
    (tmp_path / "long.txt").write_text("long " * 200)
    arguments = ["quantize", source, tmp_path / "o", "--method", "rtn", "--perplexity", tmp_path / "long.txt"]
    command = [sys.executable, "-m", "kvcompile.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code
    assert ("[transformers] Model config: pad_token_id must be" in done.stderr) == (code == 0)
    if code:
        assert done.stderr.startswith("kvcompile: error: ") and done.stderr.count("\n") == 1


def test_an_already_quantised_checkpoint_of_ours_is_refused(tmp_path, capsys):
    source = sources.write(tmp_path / "s")
    assert cli.main(["quantize", str(source), str(tmp_path / "o")]) == 0
    capsys.readouterr()
    assert "kvcompile_w4a8" in sources.refused(tmp_path, capsys, tmp_path / "o", tmp_path / "again")
    assert json.loads((tmp_path / "o" / "config.json").read_text())["quantization_config"]["format"] == 1


def test_weights_with_which_the_text_overflows_cannot_be_calibrated(tmp_path, capsys):
    state = sources.tensors(dtype=torch.float32)
    for name in sources.linear_names():
        state[f"{name}.weight"] *= 1e14 if ".mlp." in name else 1
    source = sources.write(tmp_path / "s", state)
    (tmp_path / "long.txt").write_text("long " * 200)
    assert cli.main(["quantize", *map(str, (source, tmp_path / "o", "--calibration", tmp_path / "long.txt"))]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"kvcompile: error: SRC {source}: decoder layer 0 cannot be calibrated: the text gives squares beyond float32 "
        "at the inputs of mlp.down_proj; get the checkpoint again, or use --method search, which runs no text"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["long.txt", "s"]


def test_their_perplexity_is_no_number_and_the_report_stays_json(tmp_path, capsys):
    state = sources.tensors(dtype=torch.float32)
    for name in sources.linear_names():
        state[f"{name}.weight"] *= 1e14 if ".mlp." in name else 1
    source = sources.write(tmp_path / "s", state)
    (tmp_path / "long.txt").write_text("long " * 200)
    arguments = ("--method", "rtn", "--perplexity", tmp_path / "long.txt")
    assert cli.main(["quantize", *map(str, (source, tmp_path / "o", *arguments))]) == 0
    assert "nan before" in capsys.readouterr().out

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    report = json.loads((tmp_path / "o/kvcompile_quantize.json").read_text(), parse_constant=refuse)
    assert report["perplexity"]["perplexity_before"] is None
