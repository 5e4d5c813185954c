"""What lies beside the weights of a checkpoint and goes with them: tokenizer, chat templates, licence."""

from __future__ import annotations

import os
from pathlib import Path

from kvcompile.config import UsageError
from kvcompile.tools import checked_dir
from kvcompile.tools.quantize_progress import say

TEMPLATES = "additional_chat_templates"  # the one subfolder that transformers and vLLM read

_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_NAMED = 4  # of a kind, in a line
_ANEW = ("config.json", checked_dir.MANIFEST)


def side_files(folder: Path) -> list[Path]:
    """Full paths of what is copied: no weights, nor what is written anew; of subfolders the chat templates alone.

    Raises UsageError, naming the file, for a name that is no UTF-8: that of every file is written into JSON.
    """
    entries = (path for path in _entries(folder) if path.parent != folder or not _is_made_anew(path.name))
    files = sorted(path for path in entries if path.is_file())
    for file in files:
        refuse_no_text("SRC: file", file)
    return files


def say_what_is_left_out(command: str, folder: Path, read: frozenset[str]) -> None:
    """A line each for the subfolders that are not copied, the weight files that are not in `read`, and pipes and such.

    Indices of weights are not named: the files are.
    """
    folders, weights, special = [], [], []
    for path in sorted(_entries(folder)):
        name = str(path.relative_to(folder))
        if path.is_dir():
            folders.append(name)
        elif not path.is_file():
            special.append(name)
        elif path.parent == folder and _is_weights(name) and name not in read:
            weights.append(name)
    for what, names, advice in (
        ("subfolder", folders, "copy by hand what you need of it"),
        ("weight file", weights, "nothing of it is in OUT"),
        ("special file", special, "only regular files are copied"),
    ):
        if names:
            named = ", ".join(ascii(name) if _is_no_text(name) else name for name in names[:_NAMED])
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            verb = f"{what} is" if len(names) == 1 else f"{what}s are"
            say(f"{command}: SRC's {verb} left out: {named}{more}; {advice}")


def refuse_broken_links(folder: Path) -> None:
    """Raise UsageError, naming it, for a link in the folder that leads nowhere: a download that is not whole."""
    for path in sorted(_entries(folder)):
        if path.is_symlink() and not os.path.exists(path):
            raise UsageError(
                f"SRC: {ascii(str(path)) if _is_no_text(str(path)) else path} is a link to nothing "
                f"({os.readlink(path)!r}); repair the download, or remove the link"
            )


def _entries(folder: Path) -> list[Path]:
    """What lies in the folder and in that of its chat templates, which itself is none of it."""
    templates = folder / TEMPLATES
    inside = list(templates.iterdir()) if templates.is_dir() else []
    return [path for path in (*folder.iterdir(), *inside) if path != templates or not path.is_dir()]


def refuse_no_text(what: str, path: Path) -> None:
    """Raise UsageError, with the name escaped, unless it is UTF-8."""
    if _is_no_text(str(path)):
        raise UsageError(
            f"{what} {ascii(str(path))}: the name is no text in UTF-8, in which everything is written; rename it"
        )


def _is_weights(name: str) -> bool:
    return name.endswith(_WEIGHT_FILES) and not name.endswith(".index.json")


def _is_made_anew(name: str) -> bool:
    return name in _ANEW or name.endswith(_WEIGHT_FILES)


def _is_no_text(name: str) -> bool:
    return "\\udc" in ascii(name)
