"""The tokenizer of served models, which a client needs to make prompts of a length and to cut them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcompile.config import UsageError
from kvcompile.tools.evaluate_endpoint import Endpoint
from kvcompile.tools.quantize_model import log_held_back

_PROBE = "Token ids of one model say nothing to another: naïve, 12,345, \u6c34."


def load(folder: Path, endpoints: Sequence[Endpoint]) -> Any:
    """The tokenizer of a checkpoint folder.

    Raises UsageError if there is none that works, or if an endpoint has another.
    """
    tokenizer = _loaded(folder)
    ids = list(tokenizer(_PROBE, add_special_tokens=False)["input_ids"])
    for endpoint in endpoints:
        if endpoint.tokenize(_PROBE) != ids:
            raise UsageError(
                f"--endpoint {endpoint.url}: {endpoint.model} has not the tokenizer of {folder}; give the folder of "
                "the model that is served"
            )
    return tokenizer


def chat(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a chat of one turn by the tokenizer's own template, up to where the reply begins."""
    turn = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])


def _loaded(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        with log_held_back():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever goes wrong in there is the tokenizer's doing
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UsageError(
            f"{folder}: its tokenizer cannot be loaded ({why}); give the folder of a checkpoint"
        ) from error
