"""The report of `kvcompile doctor`: its forms, and the exit code that says whether kvcompile can work."""

import json
import os
import subprocess
import sys

import pytest

from kvcompile import presets
from kvcompile.cli import main
from kvcompile.config import UsageError
from kvcompile.tools import doctor, doctor_probes
from kvcompile.tools.doctor_finding import Finding

FINE = Finding("Host", "memory", "ok", "8 GiB")
POOR = Finding("Host", "cache", "warn", "[red]/x[/red], 0.1 GiB free", "free some")
BAD = Finding("Host", "compiler", "fail", "no g++ on the path", "install g++")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("VLLM_", "KVCOMPILE_", "TORCH_COMPILE_", "TORCHDYNAMO_")) or name in ("CC", "CXX"):
            monkeypatch.delenv(name)


def _report(monkeypatch, *findings):
    monkeypatch.setattr(doctor, "everything", lambda environ: list(findings))
    monkeypatch.setattr(
        presets, "availability", lambda: [("kv8", "available", "int8 KV"), ("prune", "not yet", "pruning")]
    )


@pytest.mark.parametrize(
    ("findings", "code", "verdict"),
    [
        ([FINE], 0, "kvcompile can be used here"),
        ([FINE, POOR], 0, "kvcompile can be used here; 1 warning"),
        ([BAD], 1, "1 problem would stop kvcompile from working"),
        ([BAD, BAD, POOR, POOR], 1, "2 problems would stop kvcompile from working; 2 warnings"),
    ],
)
def test_the_exit_code_and_the_last_line_say_whether_kvcompile_can_work(monkeypatch, capsys, findings, code, verdict):
    _report(monkeypatch, *findings)
    assert main(["doctor"]) == code
    assert capsys.readouterr().out.splitlines()[-1] == verdict


def test_a_pipe_gets_plain_lines_with_the_remedy_below(monkeypatch, capsys):
    _report(monkeypatch, FINE, POOR)
    main(["doctor"])
    out = capsys.readouterr().out
    assert out.startswith(
        "Host\n"
        "  ok    memory          8 GiB\n"
        "  warn  cache           [red]/x[/red], 0.1 GiB free\n"
        "                        remedy: free some\n"
        "Configuration\n"
        "        kv8.enabled                       true      default     true or false\n"
    )
    assert "\nModules\n        kv8             available   int8 KV\n" in out
    assert "\x1b" not in out


def _on_a_terminal(monkeypatch, capsys, **environ):
    for name, value in {"TERM": "xterm", "COLUMNS": "160", **environ}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(["doctor"])
    return capsys.readouterr().out


def test_a_terminal_gets_tables_in_colour(monkeypatch, capsys):
    _report(monkeypatch, BAD, POOR)
    out = _on_a_terminal(monkeypatch, capsys)
    assert "\x1b[31mfail" in out
    assert "[red]/x[/red], 0.1 GiB free" in out
    assert "remedy: install g++" in out
    assert out.splitlines()[-1] == "1 problem would stop kvcompile from working; 1 warning"


def test_no_color_takes_the_colour_away(monkeypatch, capsys):
    _report(monkeypatch, BAD)
    assert "\x1b[31m" not in _on_a_terminal(monkeypatch, capsys, NO_COLOR="1")


def test_json_is_one_object_with_everything(monkeypatch, capsys):
    _report(monkeypatch, BAD)
    monkeypatch.setenv("KVCOMPILE_KV8_ENABLED", "false")
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == {"ok", "findings", "configuration", "modules"}
    assert report["ok"] is False
    assert report["findings"] == [
        {"section": "Host", "name": "compiler", "state": "fail", "value": "no g++ on the path", "remedy": "install g++"}
    ]
    rows = {row["key"]: (row["value"], row["source"], row["allowed"]) for row in report["configuration"]}
    pruning = {key: row for key, row in rows.items() if key.startswith("prune.")}
    assert pruning["prune.enabled"] == (True, "default", "true or false") and len(pruning) == 8
    offload = {key: row for key, row in rows.items() if key.startswith("offload.")}
    assert offload["offload.enabled"] == (False, "default", "true or false") and len(offload) == 4
    rows = {key: row for key, row in rows.items() if key not in pruning and key not in offload}
    assert rows == {
        "kv8.enabled": (False, "environment KVCOMPILE_KV8_ENABLED", "true or false"),
        "linear.enabled": (True, "default", "true or false"),
        "linear.lm_head_int8": ("auto", "default", "one of auto, always, never"),
        "passes.norm_quant": (True, "default", "true or false"),
        "passes.swiglu_quant": (True, "default", "true or false"),
        "passes.rotary": (True, "default", "true or false"),
        "passes.attention_swap": (True, "default", "true or false"),
        "scheduler.enabled": (True, "default", "true or false"),
        "scheduler.max_wait_batches": (2, "default", "a whole number, 1 <= value <= 1000000"),
        "scheduler.horizon_steps": (32, "default", "a whole number, 1 <= value <= 65536"),
        "scheduler.reserve_ratio": (0.01, "default", "a number, 0 <= value <= 1"),
        "strict": (False, "default", "true or false"),
    }
    assert report["modules"] == [
        {"module": "kv8", "state": "off", "reason": "kv8.enabled is false (environment KVCOMPILE_KV8_ENABLED)"},
        {"module": "prune", "state": "not yet", "reason": "pruning"},
    ]


def test_a_wrong_configuration_is_a_problem_of_the_report(monkeypatch, capsys, tmp_path):
    _report(monkeypatch, FINE)
    (tmp_path / "mine.toml").write_text("prune.min_tokens = 40\n")
    monkeypatch.setenv("KVCOMPILE_CONFIG", f"{tmp_path}/mine.toml")
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["configuration"] is None
    assert [f["state"] for f in report["findings"]] == ["ok", "fail"]
    assert f"prune.min_tokens is from file {tmp_path}/mine.toml" in report["findings"][1]["value"]
    assert report["findings"][1]["remedy"]


def test_wrong_variables_are_problems_each_in_a_line_and_everything_else_is_looked_at(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "everything", doctor_probes.environment)
    for name, value in {"KEEP_RATIO": "7", "WINDOW_TOKENS": "x", "METHOD": "tova", "BUDGET_TOKENS": "40"}.items():
        monkeypatch.setenv(f"KVCOMPILE_PRUNE_{name}", value)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "  fail  KVCOMPILE_PRUNE_KEEP_RATIO  prune.keep_ratio is 7.0: give a number, 0 < value <= 1, or" in out
    assert "remedy: correct it, or unset KVCOMPILE_PRUNE_KEEP_RATIO: no server starts with it\n" in out
    assert "  fail  KVCOMPILE_PRUNE_WINDOW_TOKENS  prune.window_tokens is 'x': give a whole number" in out
    assert "  fail  KVCOMPILE_PRUNE_BUDGET_TOKENS  prune.budget_tokens is 40, less than prune.sink_tokens + " in out
    assert "  ok    KVCOMPILE_PRUNE_METHOD  tova\n" in out and 'prune.method                      "tova"' in out
    assert "\nModules\n" in out and out.endswith("3 problems would stop kvcompile from working\n")


def test_asking_for_a_part_that_is_not_there_is_a_problem(monkeypatch, capsys):
    def refuse(resolved):
        raise UsageError("prune.method: not in this version")

    _report(monkeypatch, FINE)
    monkeypatch.setattr(presets, "refuse_unavailable", refuse)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "  fail  configuration   prune.method: not in this version\n" in out
    assert "kv8.enabled" in out


def test_the_real_host_is_examined_without_importing_vllm():
    code = "import sys; from kvcompile.cli import main; main(['doctor', '--json']); sys.exit('vllm' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert {"Python", "torch", "vLLM", "plug-in", "triton", "cuda-python", "compiler", "cache", "memory"} <= {
        finding["name"] for finding in findings
    }
