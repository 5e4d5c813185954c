"""MODEL, before vLLM is loaded: a folder without a checkpoint is refused, a hub name is left to vLLM."""

from pathlib import Path

import pytest

from kvcompile.config import UsageError
from kvcompile.model_path import refuse_missing_checkpoint


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder that passes for a checkpoint."""
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def _refused(model: str) -> str:
    with pytest.raises(UsageError) as caught:
        refuse_missing_checkpoint(model)
    message = str(caught.value)
    assert message.splitlines() == [message]
    return message


def test_a_checkpoint_folder_is_accepted(llama):
    refuse_missing_checkpoint(str(llama))


def test_a_checkpoint_folder_relative_to_home_is_accepted(llama, monkeypatch):
    monkeypatch.setenv("HOME", str(llama.parent))
    refuse_missing_checkpoint(f"~/{llama.name}")


@pytest.mark.parametrize("name", ["gpt2", "someone/some-model"])
def test_a_name_without_a_folder_is_left_to_vllm(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    refuse_missing_checkpoint(name)


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    expected = f"model {tmp_path}: the folder has no config.json; give a Hugging Face checkpoint"
    assert _refused(str(tmp_path)) == expected


def test_a_folder_whose_configuration_is_a_folder_is_refused(tmp_path):
    (tmp_path / "config.json").mkdir()
    assert "has no config.json" in _refused(str(tmp_path))


def test_a_file_is_refused(llama):
    name = str(llama / "config.json")
    expected = f"model {name}: is a file; give the folder of a Hugging Face checkpoint"
    assert _refused(name) == expected


@pytest.mark.parametrize(
    "name", ["{tmp}/nowhere", "./nowhere", "../nowhere", "~/nowhere", "some/where/else", "nowhere/"]
)
def test_a_missing_folder_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    name = name.format(tmp=tmp_path)
    expected = f"model {name}: no such folder; give the folder of a Hugging Face checkpoint or a hub name"
    assert _refused(name) == expected


@pytest.mark.parametrize(
    ("name", "why"), [("~nosuchuser/m", "Could not determine home directory."), ("x" * 300, "File name too long")]
)
def test_a_path_that_the_system_cannot_follow_is_refused(name: str, why: str) -> None:
    assert _refused(name) == f"model {name}: {why}; give the folder of a Hugging Face checkpoint"
