"""Requests of an evaluation that are under way at once."""

from __future__ import annotations

import pytest

from kvcompile.config import UsageError
from kvcompile.tools.evaluate_served import in_parallel


def test_answers_are_in_the_order_of_what_was_asked() -> None:
    assert in_parallel(lambda n: 2 * n, range(50), 7) == [2 * n for n in range(50)]


def test_after_a_request_that_fails_no_other_is_begun() -> None:
    begun: list[int] = []

    def ask(number: int) -> None:
        begun.append(number)
        if number == 3:
            raise UsageError("refused")

    with pytest.raises(UsageError, match="refused"):
        in_parallel(ask, range(1000), 1)
    assert begun == [0, 1, 2, 3]
