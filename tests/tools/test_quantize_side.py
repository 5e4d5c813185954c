"""What lies beside the weights: copied or named as left out, and names that cannot be written."""

import os
from pathlib import Path

import pytest
import torch
from tests.tools import qserve_sources, quantize_sources

from kvcompile import cli

NO_UTF8 = os.fsdecode(b"note\xff.txt")


@pytest.fixture(params=["quantize", "import-qserve"])
def command(request):
    return request.param


@pytest.fixture(scope="module")
def published():
    torch.manual_seed(0)
    return qserve_sources.published()


@pytest.fixture
def source(command, tmp_path, published):
    if command == "quantize":
        return quantize_sources.write(tmp_path / "s")
    return qserve_sources.write(tmp_path / "s", published)


def _refused(capsys, command, *arguments):
    assert cli.main([command, *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    return err.removeprefix("kvcompile: error: ").rstrip("\n")


@pytest.mark.parametrize("place", [NO_UTF8, f"additional_chat_templates/{NO_UTF8}"])
def test_a_file_whose_name_is_no_utf8_is_refused_before_the_work(command, source, tmp_path, capsys, place):
    (source / place).parent.mkdir(exist_ok=True)
    (source / place).write_text("x")
    assert _refused(capsys, command, source, tmp_path / "o") == (
        f"SRC: file {ascii(str(source / place))}: the name is no text in UTF-8, in which everything is written; "
        "rename it"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_weight_file_whose_name_is_no_utf8_is_refused(tmp_path, capsys):
    source = quantize_sources.write(tmp_path / "s")
    (source / "model.safetensors").rename(source / os.fsdecode(b"m\xff.safetensors"))
    assert "'; the name" not in (line := _refused(capsys, "quantize", source, tmp_path / "o"))
    assert "m\\udcff.safetensors': the name is no text in UTF-8" in line


@pytest.mark.parametrize("which", ["SRC", "OUT"])
def test_a_folder_whose_name_is_no_utf8_is_refused(command, source, tmp_path, capsys, which):
    place = tmp_path / NO_UTF8
    arguments = (place, tmp_path / "o") if which == "SRC" else (source, place)
    assert _refused(capsys, command, *arguments).startswith(f"{which} {ascii(str(place))}: the name is no text in UTF")


@pytest.mark.parametrize("which", ["SRC", "OUT"])
def test_an_empty_path_is_one_clear_line(command, source, tmp_path, capsys, which, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ("", tmp_path / "o") if which == "SRC" else (source, "")
    what = {"SRC": "the folder of a checkpoint", "OUT": "a folder to make"}[which]
    assert _refused(capsys, command, *arguments) == f"{which} is empty; give {what}"


def test_chat_templates_are_copied_and_other_subfolders_are_named(command, source, tmp_path, capsys):
    for name in ("additional_chat_templates/tool.jinja", "onnx/model.onnx", "assets/logo.svg"):
        (source / name).parent.mkdir()
        (source / name).write_text(name)
    out = tmp_path / "o"
    assert cli.main([command, str(source), str(out)]) == 0
    line = f"{command}: SRC's subfolders are left out: assets, onnx; copy by hand what you need of it"
    assert line in capsys.readouterr().err.splitlines()
    assert (out / "additional_chat_templates/tool.jinja").read_text() == "additional_chat_templates/tool.jinja"
    assert [path.name for path in out.iterdir() if path.is_dir()] == ["additional_chat_templates"]


def test_without_subfolders_nothing_is_said_of_them(command, source, tmp_path, capsys):
    assert cli.main([command, str(source), str(tmp_path / "o")]) == 0
    assert "left out" not in capsys.readouterr().err


def _said(capsys, command, source, out):
    """What a run says of what it leaves out."""
    assert cli.main([command, str(source), str(out)]) == 0
    return [line for line in capsys.readouterr().err.splitlines() if "left out" in line]


@pytest.mark.parametrize("place", ["notes.txt", "extra.safetensors", "additional_chat_templates/tool.jinja", "onnx"])
def test_a_link_to_nothing_is_refused_before_the_work(command, source, tmp_path, capsys, place):
    (source / place).parent.mkdir(exist_ok=True)
    (source / place).symlink_to("../blobs/5f2c")
    assert _refused(capsys, command, source, tmp_path / "o") == (
        f"SRC: {source / place} is a link to nothing ('../blobs/5f2c'); repair the download, or remove the link"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_no_file_that_is_a_link_to_nothing_is_taken_for_an_absent_one(command, source, tmp_path, capsys, name):
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to("nowhere")
    assert f"{name} is a link to nothing ('nowhere')" in _refused(capsys, command, source, tmp_path / "o")


def test_a_link_to_a_file_is_copied_as_a_file(command, source, tmp_path, capsys):
    (tmp_path / "blob").write_text("x")
    (source / "notes.txt").symlink_to("../blob")
    assert _said(capsys, command, source, tmp_path / "o") == []
    copied = tmp_path / "o/notes.txt"
    assert copied.read_text() == "x" and not copied.is_symlink()


def test_pipes_and_folders_among_the_templates_are_named(command, source, tmp_path, capsys):
    (source / "additional_chat_templates/more").mkdir(parents=True)
    os.mkfifo(source / "pipe")
    assert _said(capsys, command, source, tmp_path / "o") == [
        f"{command}: SRC's subfolder is left out: additional_chat_templates/more; copy by hand what you need of it",
        f"{command}: SRC's special file is left out: pipe; only regular files are copied",
    ]


def test_weight_files_of_other_formats_are_named_up_to_four(command, source, tmp_path, capsys):
    for number in range(1, 7):
        (source / f"weights-{number}.gguf").write_text("x")
    assert _said(capsys, command, source, tmp_path / "o") == [
        f"{command}: SRC's weight files are left out: weights-1.gguf, weights-2.gguf, weights-3.gguf, weights-4.gguf "
        "and 2 more; nothing of it is in OUT"
    ]


@pytest.mark.parametrize("shards", [1, 2], ids=["model.safetensors", "an index"])
def test_a_weight_file_beside_those_that_are_read_is_named(tmp_path, capsys, shards):
    source = quantize_sources.write(tmp_path / "s", shards=shards)
    (source / "extra.safetensors").write_bytes(next(source.glob("model*.safetensors")).read_bytes())
    assert _said(capsys, "quantize", source, tmp_path / "o") == [
        "quantize: SRC's weight file is left out: extra.safetensors; nothing of it is in OUT"
    ]


def test_the_bin_files_beside_safetensors_of_qserve_are_named(tmp_path, published, capsys):
    source = qserve_sources.write(tmp_path / "s", published, "model.safetensors")
    (source / "pytorch_model.bin").write_text("x")
    assert _said(capsys, "import-qserve", source, tmp_path / "o") == [
        "import-qserve: SRC's weight file is left out: pytorch_model.bin; nothing of it is in OUT"
    ]


class _Full:
    """A standard output that takes nothing, over a file descriptor of its own."""

    encoding = "utf-8"

    def __init__(self, path: Path) -> None:
        self._file, self._written = path.open("w"), 0
        self.fileno = self._file.fileno

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        self._written += 1  # like /dev/full, which does not take an empty text either
        return len(text)

    def flush(self) -> None:
        if self._written:
            raise BrokenPipeError(32, "Broken pipe")


def test_an_output_that_takes_nothing_is_named_and_the_folder_is_complete(
    command, source, tmp_path, capsys, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", _Full(tmp_path / "stdout"))
        assert cli.main([command, str(source), str(tmp_path / "o")]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"kvcompile: error: {tmp_path / 'o'} is complete, but standard output cannot be written (Broken pipe); nothing "
        "is to be done again"
    )
    assert (tmp_path / "o/config.json").is_file() and not (tmp_path / "o.part").exists()
