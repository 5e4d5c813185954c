"""config.json of the checkpoint that a command reads: judged before any work."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcompile.config import UsageError, shown
from kvcompile.llama import expected
from kvcompile.llama_values import refuse_unusable
from kvcompile.tools.quantize_side import refuse_broken_links

_AGAIN = "get the checkpoint again"


def read_config(path: Path, checkpoint: str) -> dict[str, Any]:
    """config.json in the folder `path`, which is to be `checkpoint`, such as "a QServe checkpoint".

    Raises UsageError for a folder that is none, or has a link that leads nowhere, and for a file that is no JSON.
    """
    if not path.is_dir():
        what = "is a file" if path.exists() else "no such folder"
        raise UsageError(f"SRC {path}: {what}; give the folder of {checkpoint}")
    refuse_broken_links(path)
    file = path / "config.json"
    if not file.is_file():
        raise UsageError(f"SRC {path}: the folder has no config.json; give that of {checkpoint}")
    return read_json(file)


def config_file(folder: str | Path, option: str = "") -> Path:
    """config.json of the checkpoint in `folder`, which `option`, such as "--model ", named. Raises UsageError."""
    file = Path(folder, "config.json")
    if not file.is_file():
        raise UsageError(f"{option}{folder}: no folder with a config.json; give that of a Hugging Face checkpoint")
    return file


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises UsageError for anything else, and for what could not be written again."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        copy.deepcopy(value)  # as transformers does; it takes more nesting to write it
    except RecursionError:
        raise UsageError(f"{file} cannot be read as JSON (it is nested too deeply); {_AGAIN}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read as JSON ({' '.join(str(error).split())}); {_AGAIN}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{file} holds no JSON object; {_AGAIN}")
    return value


def refuse_other_values(config: Mapping[str, Any], file: Path, supported: Sequence[str]) -> None:
    """Raise UsageError, naming `file` and the field, for another architecture, and for sizes and values of no use."""
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in supported:
        raise UsageError(
            f"{file}: architectures is {shown(names)}; allowed is a list of one of {', '.join(supported)}; correct it, "
            "or give a checkpoint of one of these"
        )
    next(expected(config, str(file)))  # it has judged every size by then
    refuse_unusable(config, str(file))


def quantised_by(described: Any) -> str:
    """The method that a quantization_config names, or as much of it as there is."""
    method = described.get("quant_method") if isinstance(described, dict) else described
    return method if isinstance(method, str) else shown(described)
