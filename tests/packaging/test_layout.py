"""What pyproject.toml declares against the folders there are."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def _packages_in_the_tree() -> list[str]:
    """Import names of all folders with an __init__.py below a folder of `package-dir`."""
    return sorted(
        ".".join((name, *path.parent.relative_to(ROOT / folder).parts))
        for name, folder in SETUPTOOLS["package-dir"].items()
        for path in (ROOT / folder).rglob("__init__.py")
    )


def test_every_folder_with_an_init_file_is_a_declared_package_and_none_else() -> None:
    assert sorted(SETUPTOOLS["packages"]) == _packages_in_the_tree(), "[tool.setuptools] packages of pyproject.toml"


def test_every_python_file_of_the_mapped_folders_lies_in_a_package() -> None:
    outside = [
        str(path.relative_to(ROOT))
        for folder in SETUPTOOLS["package-dir"].values()
        for path in (ROOT / folder).rglob("*.py")
        if not (path.parent / "__init__.py").is_file()
    ]
    assert not outside, f"a folder without an __init__.py is not installed: {outside}"


def test_every_folder_at_the_root_that_holds_python_is_mapped_or_known_not_to_be_installed() -> None:
    holding = {
        path.name
        for path in ROOT.iterdir()
        if path.is_dir() and not path.name.startswith(".") and next(path.rglob("*.py"), None)
    }
    not_installed = {"tests", "packaging", "benchmarks", "build"}
    assert holding - not_installed == set(SETUPTOOLS["package-dir"].values())
