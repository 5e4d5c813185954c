"""A user's mistake with `vllm serve --compilation-config kvcompile`: one line, no stack trace, exit code 2."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kvcompile.tools.server import free_port, group_alive
from tests.e2e.w4a8_model import write_plain, write_quantised
from tests.engine import run_python

# The `vllm` command, whose imports take some fifteen seconds, made once and forked for each mistake, two at a time.
# Arguments: a folder; and name -> (arguments, environment) as JSON. Prints name -> (process, exit code).
SERVERS = """
    import json, os, signal, sys
    import vllm.entrypoints.cli.serve, vllm.entrypoints.openai.api_server, vllm.v1.engine.async_llm
    from vllm.entrypoints.cli.main import main

    folder, running, ended = sys.argv[1], {}, {}

    def wait():
        process, status = os.wait()
        ended[running.pop(process)] = process, os.waitstatus_to_exitcode(status)

    def give_up(*_):  # a mistake that was not refused has started a server
        for process in running:
            os.killpg(process, signal.SIGKILL)

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(240)
    for name, (arguments, environment) in json.loads(sys.argv[2]).items():
        while len(running) == 2:
            wait()
        if (process := os.fork()) == 0:
            signal.alarm(0)
            os.setsid()
            for number, kind in ((1, "output"), (2, "error")):
                os.dup2(os.open(os.path.join(folder, f"{name} {kind}"), os.O_CREAT | os.O_WRONLY), number)
            os.environ.update(environment)
            sys.argv = ["vllm", "serve", *arguments]
            sys.exit(main())
        running[process] = name
    while running:
        wait()
    print("ENDED", json.dumps(ended))
"""


ASKING = ("--compilation-config", "kvcompile")


def _serve(folder: Path, cases: dict[str, tuple[list[str], dict[str, str]]]) -> dict[str, tuple[int, str, str]]:
    """Name -> (exit code, output, error) of servers that must not start, with these arguments and environments."""
    log = run_python(SERVERS, folder, json.dumps(cases))
    ended = json.loads(log.splitlines()[-1].removeprefix("ENDED "))
    assert not any(group_alive(process) for process, _ in ended.values())
    said = ("output", "error")
    return {
        name: (code, *((folder / f"{name} {kind}").read_text() for kind in said)) for name, (_, code) in ended.items()
    }


@pytest.fixture(scope="module")
def results(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[tuple[int, str, str], tuple[str, ...]]]:
    """Every mistake, made once: name -> ((exit code, output, error), parts of the one line that answers it)."""
    folder = tmp_path_factory.mktemp("bad-input")
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 128, "n_head": 2, "n_layer": 1}
    (folder / "config.json").write_text(json.dumps(gpt2))
    (folder / "kv.toml").write_text("[kv8]\nenable = true\n")
    nowhere = folder / "nowhere"
    bare = "--skip-tokenizer-init"
    damaged = write_quantised(folder / "w4a8", write_plain(folder / "plain"))
    tensors = load_file(damaged / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.group_scales"]
    save_file(tensors, damaged / "model.safetensors")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        cases = {
            "missing checkpoint": ((nowhere,), {}, (str(nowhere), "no such folder")),
            "unknown hub name": (("nobody/no-such-model",), {}, ("nobody/no-such-model",)),
            "architecture": (
                (folder, bare),
                {},
                ("GPT2LMHeadModel", "LlamaForCausalLM", "without --compilation-config"),
            ),
            "port": ((tiny_llama, "--host", "127.0.0.1", "--port", port), {}, (f"port {port}", "in use", "--port")),
            "unknown key": (
                (tiny_llama, bare),
                {"KVCOMPILE_CONFIG": str(folder / "kv.toml")},
                ("kv8.enable", "kv.toml", "kv8.enabled"),
            ),
            "value out of range": (
                (tiny_llama, bare),
                {"KVCOMPILE_OFFLOAD_LAZY_GPU_FREE_TRIGGER": "1.5"},
                ("offload.lazy_gpu_free_trigger", "1.5", "0", "1"),
            ),
            "memory": (
                (tiny_llama, bare, "--load-format", "dummy", "--kv-cache-memory-bytes", str(100 << 10)),
                {},
                ("too little memory", "512 tokens", "--max-model-len"),
            ),
            "damaged W4A8": (
                (damaged, bare),
                {},
                ("no tensor model.layers.1.mlp.up_proj.group_scales", "quantise or copy it anew"),
            ),
        }
        assert list(cases) == CASES
        anywhere = ["--port", str(free_port())]  # vLLM's default one may be in use here
        given = {
            name: ([str(model), *ASKING, *anywhere, *arguments], variables)
            for name, ((model, *arguments), variables, _) in cases.items()
        }
        logs = tmp_path_factory.mktemp("bad-input-said")
        # One of them of the command as it is installed, beside the others.
        command = [Path(sys.executable).with_name("vllm"), "serve", *given[CASES[0]][0]]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as installed:
            found = _serve(logs, given)
            output, error = installed.communicate(timeout=240)
    found[INSTALLED] = installed.returncode, output, error
    return {name: (result, cases.get(name, cases[CASES[0]])[2]) for name, result in found.items()}


CASES = [
    "missing checkpoint",
    "unknown hub name",
    "architecture",
    "port",
    "unknown key",
    "value out of range",
    "memory",
    "damaged W4A8",
]
INSTALLED = "missing checkpoint, the command itself"


@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*CASES, INSTALLED])
def test_the_mistake_is_answered_by_one_line_that_names_it_and_exit_code_2(
    name: str, results: dict[str, tuple[tuple[int, str, str], tuple[str, ...]]]
) -> None:
    (code, output, error), parts = results[name]
    assert code == 2 and "Traceback" not in output + error, error[-4000:]
    lines = [line for line in error.splitlines() if line.startswith("kvcompile: error: ")]
    assert len(lines) == 1, error[-4000:]
    for part in parts:
        assert part in lines[0]
