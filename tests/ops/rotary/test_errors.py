"""Arguments that do not fit are refused by name, with what was given and what is allowed."""

from __future__ import annotations

import pytest
import torch

from kvcompile.ops.rotary import rotary

Q = torch.zeros(3, 16, dtype=torch.bfloat16)
K = torch.zeros(3, 8, dtype=torch.bfloat16)
P = torch.tensor([0, 4, 1])
TABLE = torch.zeros(5, 8, dtype=torch.bfloat16)

CASES = [
    ((Q[0], K, P, TABLE), r"query: given 1 dimensions, allowed 2: \[tokens, channels\]"),
    ((Q.view(3, 2, 8), K, P, TABLE), "query: given 3 dimensions, allowed 2"),
    ((Q[:, :12], K, P, TABLE), "query: given 12 channels, allowed a multiple of 8"),
    ((Q, K[:, :0], P, TABLE), "key: given 0 channels, allowed a multiple of 8"),
    ((Q, K.T.contiguous().T, P, TABLE), r"key: given strides \(1, 3\), allowed stride 1 in the last dimension"),
    ((Q, K[:2], P, TABLE), "key: given 2 tokens, allowed the 3 of query"),
    ((Q, K.half(), P, TABLE), "key: given torch.float16, allowed the dtype of query: torch.bfloat16"),
    ((Q.int(), K.int(), P, TABLE.int()), "query: given torch.int32 on cpu, allowed torch.bfloat16"),
    ((Q, K.to("meta"), P, TABLE), "key: given meta, allowed the device of query: cpu"),
    ((Q, K, P.int(), TABLE), "positions: given torch.int32, allowed torch.int64"),
    ((Q, K, P[:2], TABLE), r"positions: given shape \(2,\), allowed one for each token of query: \(3,\)"),
    ((Q, K, P[None], TABLE), r"positions: given shape \(1, 3\), allowed"),
    ((Q, K, torch.arange(6)[::2], TABLE), "positions: given stride 2, allowed stride 1"),
    ((Q, K, P + 1, TABLE), "positions: given 1 to 5, allowed 0 to 4, the rows of cos_sin_cache"),
    ((Q, K, P - 1, TABLE), "positions: given -1 to 3, allowed 0 to 4, the rows of cos_sin_cache"),
    ((Q, K, P, TABLE[0]), r"cos_sin_cache: given 1 dimensions, allowed 2: \[positions, head size\]"),
    ((Q, K, P, TABLE[:, :0]), "cos_sin_cache: given 0 columns, allowed an even number of 2 or more"),
    ((Q, K, P, TABLE[:, :7].contiguous()), "cos_sin_cache: given 7 columns, allowed an even number of 2 or more"),
    ((Q, K, P, TABLE[:, :4]), r"cos_sin_cache: given strides \(8, 1\), allowed a contiguous tensor"),
    ((Q, K, P, TABLE.float()), "cos_sin_cache: given torch.float32, allowed the dtype of query: torch.bfloat16"),
]


@pytest.mark.parametrize(("arguments", "words"), CASES)
def test_what_does_not_fit_is_refused(arguments: tuple[torch.Tensor, ...], words: str) -> None:
    with pytest.raises(ValueError, match=f"^kvcompile::rotary: {words}"):
        rotary(*arguments)
