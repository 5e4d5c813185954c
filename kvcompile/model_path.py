"""MODEL as the user typed it: what can be said of it before vLLM is loaded, which takes half a minute."""

from __future__ import annotations

from pathlib import Path

from kvcompile.config import UsageError


def refuse_missing_checkpoint(model: str) -> None:
    """A local path must hold a config.json; a name without a folder behind it is left to vLLM (a hub id).

    Raises UsageError, also for a path that the system cannot follow.
    """
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            if not (path / "config.json").is_file():
                raise UsageError(f"model {model}: the folder has no config.json; give a Hugging Face checkpoint")
            return
        exists = path.exists()
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"model {model}: {why}; give the folder of a Hugging Face checkpoint") from error
    if exists:
        raise UsageError(f"model {model}: is a file; give the folder of a Hugging Face checkpoint")
    if path.is_absolute() or model.startswith((".", "~")) or model.endswith("/") or model.count("/") > 1:
        raise UsageError(f"model {model}: no such folder; give the folder of a Hugging Face checkpoint or a hub name")
