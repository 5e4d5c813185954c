"""`config/optimized.env`: the same to a shell and to those who take it line by line, known in full, and complete."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvcompile.config import OPTIONS, resolve
from kvcompile.config_sources import ALIASES, RESERVED, environment_name, read_environment

ROOT = Path(__file__).parents[2]
FILE = ROOT / "config/optimized.env"
SCRIPT = (ROOT / "scripts/serve.sh").read_text()
# What docker, systemd and a shell all take for a value, as it stands.
LINE = re.compile(r"(# )?([A-Z][A-Z0-9_]*)=([A-Za-z0-9_./:+-]+)")


def _lines() -> list[str]:
    return FILE.read_text().splitlines()


def _given() -> dict[str, str]:
    """The variables that are set, as docker and systemd read them: everything behind the first `=`."""
    return dict(line.split("=", 1) for line in _lines() if line and not line.startswith("#"))


def _shown() -> dict[str, str]:
    """The variables that are commented out."""
    found = [LINE.fullmatch(line) for line in _lines()]
    return {match[2]: match[3] for match in found if match and match[1]}


def _of_script() -> set[str]:
    """What the script says at its top that it reads."""
    top = SCRIPT.partition("set -euo pipefail")[0]
    return {
        name for names in re.findall(r"^#   ([A-Z_]+(?:, [A-Z_]+)*)  ", top, re.MULTILINE) for name in names.split(", ")
    }


def test_every_line_is_a_comment_or_a_plain_assignment_and_none_is_given_twice() -> None:
    wrong = [line for line in _lines() if line and not line.startswith("#") and not LINE.fullmatch(line)]
    assert not wrong
    named = [line.split("=")[0] for line in _lines() if line and not line.startswith("#")]
    assert len(named) == len(set(named))
    assert not _given().keys() & _shown().keys()


def test_a_shell_that_loads_it_exports_what_line_readers_see() -> None:
    loaded = subprocess.run(
        [shutil.which("bash"), "-euc", f'set -a; . "{FILE}"; env -0'],
        env={"PATH": os.defpath},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    exported = dict(entry.split("=", 1) for entry in loaded.split("\0") if entry)
    assert {name: value for name, value in exported.items() if name not in ("PATH", "PWD", "SHLVL", "_")} == _given()


def test_every_variable_is_one_that_the_script_or_kvcompile_reads() -> None:
    ours = {*map(environment_name, OPTIONS), *ALIASES, *RESERVED}
    assert {*_given(), *_shown()} == ours | _of_script()
    assert all(name in SCRIPT for name in _of_script())


def test_kvcompile_takes_what_is_set_and_nothing_of_it_changes_a_default() -> None:
    assert resolve(environ=_given()).sources == {}


@pytest.mark.parametrize("key", OPTIONS)
def test_every_option_of_kvcompile_is_there_commented_out_with_its_default(key: str) -> None:
    name = environment_name(key)
    found = read_environment({name: _shown()[name]}, OPTIONS)
    assert found[key].value == OPTIONS[key].default


def test_every_choice_of_an_option_is_named() -> None:
    words = set(re.findall(r"\w+", FILE.read_text()))
    assert {choice for rules in OPTIONS.values() for choice in rules.choices or ()} <= words


def test_with_a_model_the_script_takes_the_file_as_it_is(tmp_path: Path) -> None:
    vllm = tmp_path / "vllm"
    vllm.write_text("#!/bin/sh\nexit 1\n")
    vllm.chmod(0o755)
    given = _given()
    environment = {"PATH": os.defpath, "MODEL": "/models/llama", "VLLM": str(vllm), **given}
    command = [ROOT / "scripts/serve.sh", "--dry-run"]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    flags = {
        "--max-model-len": "MAX_MODEL_LEN",
        "--max-num-batched-tokens": "MAX_NUM_BATCHED_TOKENS",
        "--max-num-seqs": "MAX_NUM_SEQS",
        "--gpu-memory-utilization": "GPU_MEMORY_UTILIZATION",
        "--host": "SERVER_HOST",
        "--port": "PORT",
    }
    words = [word for flag, name in flags.items() for word in (flag, given[name])]
    assert printed.split() == [str(vllm), "serve", "/models/llama", "--compilation-config", "kvcompile", *words]
