"""What lies beside the weights of a checkpoint and goes with them: tokenizer, chat templates, licence."""

from __future__ import annotations

from pathlib import Path

from kvcompile.config import UsageError
from kvcompile.tools import checked_dir
from kvcompile.tools.quantize_progress import say

TEMPLATES = "additional_chat_templates"  # the one subfolder that transformers and vLLM read

_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_ANEW = ("config.json", checked_dir.MANIFEST)


def side_files(folder: Path) -> list[Path]:
    """Full paths of what is copied: no weights, nor what is written anew; of subfolders the chat templates alone.

    Raises UsageError, naming the file, for a name that is no UTF-8: that of every file is written into JSON.
    """
    top = (path for path in folder.iterdir() if path.name not in _ANEW and not path.name.endswith(_WEIGHT_FILES))
    templates = (folder / TEMPLATES).iterdir() if (folder / TEMPLATES).is_dir() else ()
    files = sorted(path for path in (*top, *templates) if path.is_file())
    for file in files:
        refuse_no_text("SRC: file", file)
    return files


def say_what_is_left_out(command: str, folder: Path) -> None:
    """One line with the subfolders that are not copied, if there are any."""
    others = sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name != TEMPLATES)
    if others:
        named = ", ".join(ascii(name) if _is_no_text(name) else name for name in others)
        what = "subfolder is" if len(others) == 1 else "subfolders are"
        say(f"{command}: SRC's {what} left out: {named}; copy by hand what you need of it")


def refuse_no_text(what: str, path: Path) -> None:
    """Raise UsageError, with the name escaped, unless it is UTF-8."""
    if _is_no_text(str(path)):
        raise UsageError(
            f"{what} {ascii(str(path))}: the name is no text in UTF-8, in which everything is written; rename it"
        )


def _is_no_text(name: str) -> bool:
    return "\\udc" in ascii(name)
