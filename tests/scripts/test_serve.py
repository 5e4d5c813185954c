"""`scripts/serve.sh` with a `vllm` that only notes its arguments: the command, and every mistake in one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/serve.sh"
BASH = shutil.which("bash")

# Its process and its environment tell whether the script is gone and what it has handed on.
VLLM = f"""#!{sys.executable}
import json, os, sys
print(json.dumps({{"arguments": sys.argv[1:], "pid": os.getpid(), "environment": dict(os.environ)}}))
"""


class Host(NamedTuple):
    """bin: the folder of `vllm`, first on PATH, in front of the system's."""

    bin: Path

    def start(self, *arguments: str, **settings: str) -> subprocess.Popen[str]:
        environment = {"PATH": f"{self.bin}:{os.defpath}", **settings}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [SCRIPT, *arguments], env=environment, cwd=self.bin, stdout=pipe, stderr=pipe, text=True
        )

    def run(self, *arguments: str, **settings: str) -> list[str]:
        """What the server was called with."""
        return self.called(*arguments, **settings)["arguments"]

    def called(self, *arguments: str, **settings: str) -> dict:
        process = self.start(*arguments, **settings)
        out, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
        return {**json.loads(out), "script": process.pid}

    def refused(self, *arguments: str, **settings: str) -> str:
        """The one line, without the script's name; the server is not started, in a dry run as without it."""
        for more in ((), ("--dry-run",)):
            process = self.start(*arguments, *more, **settings)
            out, errors = process.communicate(timeout=60)
            assert (process.returncode, out, errors.count("\n")) == (2, "", 1), errors
        assert errors.startswith("serve.sh: error: ")
        return errors.removeprefix("serve.sh: error: ").rstrip("\n")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    host = Host(tmp_path / "bin")
    host.bin.mkdir()
    (host.bin / "vllm").write_text(VLLM)
    (host.bin / "vllm").chmod(0o755)
    return host


def test_the_script_is_executable_and_its_syntax_is_right() -> None:
    assert os.access(SCRIPT, os.X_OK)
    done = subprocess.run([BASH, "-n", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_with_a_model_alone_everything_else_is_vllms_default(host: Host) -> None:
    assert host.run(MODEL="/models/llama") == ["serve", "/models/llama", "--compilation-config", "kvcompile"]


def test_every_setting_becomes_its_flag_and_further_arguments_come_last(host: Host) -> None:
    settings = {
        "MODEL": "org/model",
        "MAX_MODEL_LEN": "32768",
        "MAX_NUM_BATCHED_TOKENS": "8192",
        "MAX_NUM_SEQS": "256",
        "GPU_MEMORY_UTILIZATION": "0.9",
        "SERVER_HOST": "::1",
        "PORT": "65535",
    }
    assert host.run("--port", "1", "--served-model-name", "a b", "", **settings) == [
        *("serve", "org/model", "--compilation-config", "kvcompile", "--max-model-len", "32768"),
        *("--max-num-batched-tokens", "8192", "--max-num-seqs", "256", "--gpu-memory-utilization", "0.9"),
        *("--host", "::1", "--port", "65535", "--port", "1", "--served-model-name", "a b", ""),
    ]


def test_an_empty_setting_is_one_that_is_not_there(host: Host) -> None:
    names = ["MAX_MODEL_LEN", "MAX_NUM_BATCHED_TOKENS", "MAX_NUM_SEQS", "GPU_MEMORY_UTILIZATION", "SERVER_HOST"]
    names += ["PORT", "OFFLOAD", "OFFLOAD_CONFIG", "VLLM_ANDPRO_BUDGET_TOKENS", "KVCOMPILE_PRUNE_BUDGET_TOKENS"]
    called = host.called(MODEL="m", **dict.fromkeys(names, ""))
    assert called["arguments"] == ["serve", "m", "--compilation-config", "kvcompile"]
    assert not {"VLLM_ANDPRO_BUDGET_TOKENS", "KVCOMPILE_PRUNE_BUDGET_TOKENS"} & called["environment"].keys()


def test_the_server_takes_the_place_of_the_script_so_that_signals_reach_it(host: Host) -> None:
    called = host.called(MODEL="m")
    assert called["pid"] == called["script"]


@pytest.mark.parametrize("model", ["/models/a model", 'it\'s; $(touch x) `touch y` "*"', "models/ü\n"])
def test_a_model_of_any_name_is_one_argument_and_is_not_expanded(host: Host, model: str) -> None:
    assert host.run(MODEL=model)[1] == model
    assert [path.name for path in host.bin.iterdir()] == ["vllm"]


def test_a_dry_run_prints_what_would_run_and_a_shell_reads_it_back(host: Host) -> None:
    settings = {"MODEL": "/models/a 'model'", "OFFLOAD": "1", "PORT": "8001", "LC_ALL": "C"}
    process = host.start("--served-model-name", "x y", "--dry-run", "--seed", "1", **settings)
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    read = subprocess.run(
        [BASH, "-c", f'printf "%s\\0" {printed}'], capture_output=True, text=True, check=True
    ).stdout.split("\0")[:-1]
    assert read == ["vllm", *host.run("--served-model-name", "x y", "--seed", "1", **settings)]
    assert read[-4:] == ["--served-model-name", "x y", "--seed", "1"]


@pytest.mark.parametrize("name", ["VLLM_ANDPRO_BUDGET_TOKENS", "KVCOMPILE_PRUNE_BUDGET_TOKENS"])
@pytest.mark.parametrize("value", ["4096", "none"])
def test_a_budget_stays_in_the_environment_for_kvcompile_to_read(host: Host, name: str, value: str) -> None:
    called = host.called(MODEL="m", **{name: value})
    assert called["arguments"][4:] == []
    assert called["environment"][name] == value
    printed, _ = host.start("--dry-run", MODEL="m", **{name: value}).communicate(timeout=60)
    assert printed == "vllm serve m --compilation-config kvcompile\n"


@pytest.mark.parametrize(
    "decides", [{}, {"KVCOMPILE_PRUNE_ENABLED": "0"}, {"KVCOMPILE_CONFIG": "/etc/kvcompile.toml"}], ids=str
)
def test_whether_to_prune_is_not_the_scripts_to_say(host: Host, decides: dict[str, str]) -> None:
    called = host.called(MODEL="m", VLLM_ANDPRO_BUDGET_TOKENS="4096", **decides)
    said = {key: value for key, value in called["environment"].items() if key.startswith("KVCOMPILE_")}
    assert said == decides


def test_offload_hands_over_the_file_beside_the_script_or_another(host: Host, tmp_path: Path) -> None:
    flag, given = host.run(MODEL="m", OFFLOAD="1")[4:]
    assert flag == "--kv-transfer-config"
    assert json.loads(given) == json.loads((ROOT / "config/offload.json").read_text())
    other = tmp_path / "an other.json"
    other.write_text('{"kv_connector": "X"}\n')
    assert host.run(MODEL="m", OFFLOAD="1", OFFLOAD_CONFIG=str(other))[5] == '{"kv_connector": "X"}'
    assert host.run(MODEL="m", OFFLOAD="0", OFFLOAD_CONFIG=str(other))[4:] == []


def test_the_file_beside_the_script_is_found_from_any_folder_and_through_a_path_with_spaces(
    host: Host, tmp_path: Path
) -> None:
    copy = tmp_path / "a tree"
    for folder in ("scripts", "config"):
        shutil.copytree(ROOT / folder, copy / folder)
    done = subprocess.run(
        ["scripts/serve.sh"],
        cwd=copy,
        env={"PATH": f"{host.bin}:{os.defpath}", "MODEL": "m", "OFFLOAD": "1", "CDPATH": str(copy)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(json.loads(done.stdout)["arguments"][5])["kv_connector"] == "KVCompileOffload"


def test_another_vllm_command_may_be_named(host: Host, tmp_path: Path) -> None:
    other = tmp_path / "an other" / "vllm"
    other.parent.mkdir()
    shutil.move(host.bin / "vllm", other)
    assert host.run(MODEL="m", VLLM=str(other))[:2] == ["serve", "m"]


def test_help_is_what_stands_at_the_top_and_needs_no_setting(host: Host) -> None:
    process = host.start("--help")
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    lines = SCRIPT.read_text().splitlines()[1:]
    assert printed.splitlines() == [
        line.removeprefix("#").removeprefix(" ") for line in lines[: lines.index("set -euo pipefail")]
    ]


@pytest.mark.parametrize("settings", [{}, {"MODEL": ""}], ids=["unset", "empty"])
def test_without_a_model_it_does_not_start(host: Host, settings: dict[str, str]) -> None:
    assert host.refused(**settings) == (
        "MODEL is not set; set it to the folder of a Hugging Face checkpoint, or to a hub name"
    )


def test_a_value_of_two_lines_is_told_in_one(host: Host) -> None:
    assert host.refused(MODEL="m", PORT="1\n2").startswith("PORT is $'1\\n2'; allowed is ")


def test_a_model_that_looks_like_an_option_is_refused(host: Host) -> None:
    assert host.refused(MODEL="--seed") == (
        "MODEL is '--seed', which would be taken for an option; write ./ before a folder's name"
    )


WHOLE = ["MAX_MODEL_LEN", "MAX_NUM_BATCHED_TOKENS", "MAX_NUM_SEQS", "PORT"]
BUDGETS = ["VLLM_ANDPRO_BUDGET_TOKENS", "KVCOMPILE_PRUNE_BUDGET_TOKENS"]


@pytest.mark.parametrize("name", [*WHOLE, *BUDGETS])
@pytest.mark.parametrize("value", ["x", "0", "-1", "1.5", "1e3", "08", "0x10", " 1", "1 ", "9" * 30, "a[$(touch x)]"])
def test_what_is_no_whole_number_is_refused_by_name_and_never_evaluated(host: Host, name: str, value: str) -> None:
    most = 65535 if name == "PORT" else 2147483647
    assert host.refused(MODEL="m", **{name: value}) == (
        f"{name} is '{value}'; allowed is a whole number from 1 to {most}; correct it, or unset it for the default"
    )
    assert [path.name for path in host.bin.iterdir()] == ["vllm"]


@pytest.mark.parametrize("name", [*WHOLE, *BUDGETS])
def test_the_largest_whole_number_is_taken_and_the_next_is_refused(host: Host, name: str) -> None:
    most = 65535 if name == "PORT" else 2147483647
    assert host.called(MODEL="m", **{name: str(most)})["environment"][name] == str(most)
    assert host.refused(MODEL="m", **{name: str(most + 1)}).startswith(f"{name} is '{most + 1}'; allowed is ")


@pytest.mark.parametrize("value", ["0.9", ".5", "1", "1.0", "1.", "0.05"])
def test_a_share_of_memory_is_handed_on_as_it_is_written(host: Host, value: str) -> None:
    assert host.run(MODEL="m", GPU_MEMORY_UTILIZATION=value)[4:] == ["--gpu-memory-utilization", value]


@pytest.mark.parametrize("value", ["0", "0.0", "1.1", "90", "-0.5", "90%", "much", "0.9 ", "nan"])
def test_what_is_no_share_of_memory_is_refused(host: Host, value: str) -> None:
    assert host.refused(MODEL="m", GPU_MEMORY_UTILIZATION=value) == (
        f"GPU_MEMORY_UTILIZATION is '{value}'; allowed is a number above 0, at most 1; correct it, or unset it"
    )


@pytest.mark.parametrize("value", ["true", "2", "yes", "11"])
def test_offload_is_one_or_zero(host: Host, value: str) -> None:
    assert host.refused(MODEL="m", OFFLOAD=value) == f"OFFLOAD is '{value}'; allowed are 1 and 0"


@pytest.mark.parametrize("name", ["nowhere.json", "a folder"])
def test_a_file_for_offload_that_is_not_there_is_refused(host: Host, tmp_path: Path, name: str) -> None:
    (tmp_path / "a folder").mkdir()
    file = tmp_path / name
    assert host.refused(MODEL="m", OFFLOAD="1", OFFLOAD_CONFIG=str(file)) == (
        f"OFFLOAD_CONFIG '{file}' is no file that can be read; name one, or set OFFLOAD=0"
    )


def test_without_a_vllm_command_it_says_what_to_do(host: Host) -> None:
    (host.bin / "vllm").chmod(0o644)
    missing = "is not there or cannot be run; activate vLLM's environment, or set VLLM to its path"
    assert host.refused(MODEL="m") == f"the command 'vllm' {missing}"
    assert host.refused(MODEL="m", VLLM=str(ROOT)) == f"the command '{ROOT}' {missing}"
    assert host.refused(MODEL="m", VLLM="/nowhere/a vllm") == f"the command '/nowhere/a vllm' {missing}"
    assert host.refused(MODEL="m", VLLM="") == (
        "VLLM is empty; set it to the path of the vllm command, or unset it for the one on PATH"
    )
