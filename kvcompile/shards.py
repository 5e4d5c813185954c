"""How a checkpoint's files are named: the index, and numbered shards that say how many there are."""

from __future__ import annotations

import re
from collections.abc import Iterable

INDEX = "model.safetensors.index.json"
_NUMBERED = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")


def announced(names: Iterable[str]) -> set[str]:
    """The files that belong to numbered ones among `names`: model-00002-of-00003 says that there are three."""
    numbered = [match for match in map(_NUMBERED.fullmatch, names) if match]
    return {f"{m[1]}-{i:05}-of-{m[2]}.safetensors" for m in numbered for i in range(1, int(m[2]) + 1)}
