"""How much of a prompt is kept: budgets of the server and of requests, and what they release."""

from __future__ import annotations

import pytest

from kvcompile.config import PruneConfig, UsageError
from kvcompile.prune.plan import Plan, plan, request_budget

HALF = PruneConfig()
ABSOLUTE = PruneConfig(budget_tokens=544)


@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("config", [HALF, ABSOLUTE, PruneConfig(keep_ratio=0.25, min_tokens=52)])
def test_at_least_the_budget_and_less_than_a_block_more_is_kept(config: PruneConfig, block_size: int) -> None:
    for tokens in range(1, 6000, 7):
        found = plan(tokens, block_size, config, 0)
        budget = config.budget_tokens or max(-(-tokens * config.keep_ratio // 1), config.min_tokens)
        budget = max(budget, 4 + 32 + block_size)
        if found is None:
            assert tokens < budget + block_size
            continue
        assert budget <= found.kept < budget + block_size
        assert found.first + found.kept == tokens and found.first % block_size == 0 and found.released > 0


def test_short_prompts_stay_whole_and_long_ones_keep_half() -> None:
    assert plan(544, 16, HALF, 0) is None and plan(559, 16, HALF, 0) is None
    assert plan(560, 16, HALF, 0) == Plan(560, 1, 16, 0)
    assert plan(4000, 16, HALF, 3) == Plan(4000, 125, 16, 3)
    assert plan(100_000, 16, ABSOLUTE, 0).kept == 544


def test_the_whole_prompt_is_kept_at_a_ratio_of_one() -> None:
    everything = PruneConfig(keep_ratio=1.0, min_tokens=52)
    assert all(plan(tokens, 16, everything, 0) is None for tokens in range(1, 3000))


def test_sink_window_and_a_block_are_never_given_up() -> None:
    least = PruneConfig(budget_tokens=52)
    assert plan(1000, 128, least, 0).kept >= 4 + 32 + 128


def test_a_request_has_its_own_budget_or_none() -> None:
    assert request_budget(None, HALF, 16) is None and request_budget({"other": 1}, HALF, 16) is None
    assert plan(1000, 16, HALF, 0, request_budget({"kv_budget_tokens": 100}, HALF, 16)).kept == 104
    for off in (False, 0, "false"):
        assert plan(100_000, 16, ABSOLUTE, 0, request_budget({"kv_prune": off}, HALF, 16)) is None
    assert request_budget({"kv_prune": True, "kv_budget_tokens": 600}, HALF, 16) == 600


@pytest.mark.parametrize("value", [51, 0, -5, 60.0, "100", True, [600]])
def test_a_wrong_budget_is_refused_with_the_least_that_is_allowed(value: object) -> None:
    with pytest.raises(UsageError, match=r"^kv_budget_tokens is .*; allowed are whole numbers of at least 52, "):
        request_budget({"kv_budget_tokens": value}, HALF, 16)


@pytest.mark.parametrize("value", ["no", 2, None, []])
def test_a_switch_is_true_or_false(value: object) -> None:
    with pytest.raises(UsageError, match=r"^kv_prune is .*; allowed are true and false$"):
        request_budget({"kv_prune": value}, HALF, 16)
