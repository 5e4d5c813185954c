"""kvcompile installed alone, from a wheel and editable, into environments that hold nothing else; without a network."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PYPROJECT["tool"]["setuptools"]["packages"]
PACKAGE_DIR: dict[str, str] = PYPROJECT["tool"]["setuptools"]["package-dir"]
DATA_SUFFIXES = (".cu", ".cuh")

pytestmark = pytest.mark.slow

# Runs in the environment under test. Packages are located without being imported, since torch is not there.
REPORT = """
import importlib.metadata, importlib.util, json, sys

def locate(name):
    path = None
    for end in [i for i, c in enumerate(name + ".") if c == "."]:
        specs = (finder.find_spec(name[:end], path) for finder in sys.meta_path)
        spec = next((s for s in specs if s is not None), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec.origin

packages, strangers = json.loads(sys.argv[1])
import kvcompile, kvcompile.cli, kvcompile.config, kvcompile.plugin
distribution = importlib.metadata.distribution("kvcompile")
print(json.dumps({
    "version": kvcompile.__version__,
    "third_party": sorted({m.split(".")[0] for m in sys.modules} & {"torch", "vllm", "rich", "numpy"}),
    "packages": {name: locate(name) for name in packages},
    "strangers": [name for name in strangers if importlib.util.find_spec(name)],
    "entry_points": [[e.group, e.name, e.value] for e in distribution.entry_points],
    "distributions": sorted(d.metadata["Name"] for d in importlib.metadata.distributions()),
}))
"""


class Installation(NamedTuple):
    bin: Path
    """The environment's folder of commands."""
    report: dict[str, Any]
    """What REPORT printed there."""
    wheel: Path
    source: Path
    """The copy of the tree that the wheel was built from."""


def _run(*command: str | Path, cwd: Path) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def _copy_of_the_tree(target: Path) -> Path:
    """What a build reads. A copy, since a build leaves files in the tree and takes up those of an earlier one."""
    target.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, target)
    for folder in PACKAGE_DIR.values():
        shutil.copytree(ROOT / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return target


@pytest.fixture(scope="module", params=["build_wheel", "build_editable"], ids=["wheel", "editable"])
def installation(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    tmp = tmp_path_factory.mktemp(request.param)
    source = _copy_of_the_tree(tmp / "source")
    # The build backend's own hooks: what pip calls, without the isolated environment that pip would download.
    hook = f"import sys; from setuptools import build_meta; build_meta.{request.param}(sys.argv[1])"
    _run(sys.executable, "-c", hook, tmp, cwd=source)
    (wheel,) = tmp.glob("*.whl")

    _run(sys.executable, "-m", "venv", "--without-pip", tmp / "env", cwd=tmp)
    python = tmp / "env/bin/python"
    _run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp)
    strangers = [*{name.rpartition(".")[2] for name in PACKAGES} - {"kvcompile"}, "tests", "packaging"]
    printed = _run(python, "-c", REPORT, json.dumps([PACKAGES, strangers]), cwd=tmp)
    return Installation(python.parent, json.loads(printed), wheel, source)


def test_the_command_line_and_the_configuration_import_without_any_dependency(installation: Installation) -> None:
    assert installation.report["distributions"] == ["kvcompile"]
    assert installation.report["third_party"] == []
    assert installation.report["version"] == PYPROJECT["project"]["version"]


def test_the_command_prints_its_version(installation: Installation) -> None:
    printed = _run(installation.bin / "kvcompile", "--version", cwd=installation.bin)
    assert PYPROJECT["project"]["version"] in printed.split()


def test_every_declared_package_is_found(installation: Installation) -> None:
    missing = [name for name, origin in installation.report["packages"].items() if origin is None]
    assert not missing
    if "editable" in installation.wheel.name:
        expected = {name: str(installation.source / _folder(name) / "__init__.py") for name in PACKAGES}
        assert installation.report["packages"] == expected


def test_nothing_but_kvcompile_is_importable_at_top_level(installation: Installation) -> None:
    assert installation.report["strangers"] == []


def test_the_entry_points_are_registered(installation: Installation) -> None:
    assert sorted(installation.report["entry_points"]) == [
        ["console_scripts", "kvcompile", "kvcompile.cli:command"],
        ["vllm.general_plugins", "kvcompile", "kvcompile.plugin:register"],
    ]


def _folder(package: str) -> Path:
    """Where `package` lies in the tree: the longest prefix that package-dir maps, then the rest of the name."""
    prefix = max((name for name in PACKAGE_DIR if f"{package}.".startswith(f"{name}.")), key=len)
    return Path(PACKAGE_DIR[prefix], *package.removeprefix(prefix).split("."))


def _is_installed(path: Path) -> bool:
    return path.suffix in (".py", *DATA_SUFFIXES) or path.name == "py.typed" or path.parent.name in ("data", "tables")


def _matching(predicate: Callable[[Path], bool]) -> set[str]:
    """Paths inside a wheel of the tree's files below PACKAGE_DIR for which `predicate` holds."""
    return {
        "/".join((*name.split("."), *path.relative_to(ROOT / folder).parts))
        for name, folder in PACKAGE_DIR.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and predicate(path)
    }


@pytest.mark.parametrize("installation", ["build_wheel"], indirect=True, ids=["wheel"])
def test_a_wheel_holds_every_module_kernel_source_and_data_file_and_the_licence(installation: Installation) -> None:
    held = set(zipfile.ZipFile(installation.wheel).namelist())
    metadata = {name for name in held if name.startswith("kvcompile-") and ".dist-info/" in name}
    assert held - metadata == _matching(_is_installed)
    assert "kvcompile/py.typed" in held
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in metadata)
