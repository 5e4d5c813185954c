"""The `kvcompile` operator namespace of torch.library, and the one way in which an operator enters it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# torch drops the operators of a Library once the object is collected, so it lives as long as this module.
LIBRARY = torch.library.Library("kvcompile", "FRAGMENT")


def register(schema: str, *, fake: Callable[..., Any], **kernels: Callable[..., Any]) -> torch._ops.OpOverload:
    """Define `kvcompile::<schema>` with its fake (meta) and one kernel per dispatch key, and return the operator.

    `schema`: name, arguments and result in torch's schema language; `kernels`: for example `CPU=...`. A name that this
    process has defined already (the module was imported again) keeps its first kernels.
    """
    name = schema.partition("(")[0]
    if not hasattr(torch.ops.kvcompile, name):
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for dispatch_key, kernel in kernels.items():
            LIBRARY.impl(name, kernel, dispatch_key)
        torch.library.register_fake(f"kvcompile::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.kvcompile, name).default
