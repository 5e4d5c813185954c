"""How much of a prompt is kept: budgets of the server and of requests, and what they release."""

from __future__ import annotations

import pytest

from kvcompile.config import PruneConfig, UsageError
from kvcompile.prune.plan import Plan, plan, request_budget, shortest_pruned

HALF = PruneConfig()
ABSOLUTE = PruneConfig(budget_tokens=544)


@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("config", [HALF, ABSOLUTE, PruneConfig(keep_ratio=0.25, min_tokens=164)])
def test_at_least_the_budget_and_less_than_a_block_more_is_kept(config: PruneConfig, block_size: int) -> None:
    for tokens in range(1, 6000, 7):
        found = plan(tokens, block_size, config)
        budget = config.budget_tokens or max(-(-tokens * config.keep_ratio // 1), config.min_tokens)
        if found is None:
            assert tokens < budget + block_size
            continue
        assert budget <= found.kept < budget + block_size
        assert found.first + found.kept == tokens and found.first % block_size == 0 and found.released > 0


def test_short_prompts_stay_whole_and_long_ones_keep_half() -> None:
    assert plan(544, 16, HALF) is None and plan(559, 16, HALF) is None
    assert plan(560, 16, HALF) == Plan(560, 1, 16)
    assert plan(4000, 16, HALF) == Plan(4000, 125, 16)
    assert plan(100_000, 16, ABSOLUTE).kept == 544


def test_the_whole_prompt_is_kept_at_a_ratio_of_one() -> None:
    everything = PruneConfig(keep_ratio=1.0, min_tokens=52)
    assert all(plan(tokens, 16, everything) is None for tokens in range(1, 3000))


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("config", [HALF, ABSOLUTE, PruneConfig(keep_ratio=0.99), PruneConfig(keep_ratio=0.01)])
def test_the_shortest_prompt_that_is_pruned_is_found(config: PruneConfig, block_size: int) -> None:
    pruned = [tokens for tokens in range(20_000) if plan(tokens, block_size, config)]
    shortest = shortest_pruned(config, block_size, 20_000)
    assert shortest == pruned[0] and len(pruned) == 20_000 - shortest
    assert shortest_pruned(config, block_size, shortest) == shortest
    assert shortest_pruned(config, block_size, shortest - 1) is None


def test_no_prompt_is_pruned_of_which_all_is_kept() -> None:
    assert shortest_pruned(PruneConfig(keep_ratio=1.0), 16, 10**6) is None


def test_a_request_has_its_own_budget_or_none() -> None:
    assert request_budget(None, HALF, 16) is None and request_budget({"other": 1}, HALF, 16) is None
    assert plan(1000, 16, HALF, request_budget({"kv_budget_tokens": 100}, HALF, 16)).kept == 104
    for off in (False, 0, "false"):
        assert plan(100_000, 16, ABSOLUTE, request_budget({"kv_prune": off}, HALF, 16)) is None
    assert request_budget({"kv_prune": True, "kv_budget_tokens": 600}, HALF, 16) == 600


@pytest.mark.parametrize("value", [51, 1, 0, -1, 60.0, 1e9, 10**30, 2**31, "x", "100", True, [600], "9" * 10_000])
def test_a_wrong_budget_is_refused_with_the_least_that_is_allowed(value: object) -> None:
    with pytest.raises(UsageError, match=r"^kv_budget_tokens is .*; allowed are integers of at least 52, "):
        request_budget({"kv_budget_tokens": value}, HALF, 16)


def test_the_largest_budget_is_what_a_message_to_the_engine_can_carry() -> None:
    assert request_budget({"kv_budget_tokens": 2**31 - 1}, HALF, 16) == 2**31 - 1


def test_a_budget_and_no_pruning_contradict_each_other() -> None:
    with pytest.raises(UsageError, match="^kv_prune is false and kv_budget_tokens is 600; give one of the two$"):
        request_budget({"kv_prune": False, "kv_budget_tokens": 600}, HALF, 16)
    with pytest.raises(UsageError, match="^kv_budget_tokens is 'x'; "):
        request_budget({"kv_prune": False, "kv_budget_tokens": "x"}, HALF, 16)


@pytest.mark.parametrize("key", ["kv_budget_token", "kv_", "kv_pruned", "kv_budget"])
def test_a_key_that_is_written_wrongly_is_refused_with_those_that_there_are(key: str) -> None:
    with pytest.raises(UsageError) as caught:
        request_budget({key: 600}, HALF, 16)
    allowed = "allowed of what begins with kv_ are kv_budget_tokens and kv_prune; correct it, or leave it out"
    assert str(caught.value) == f"'{key}' is unknown; {allowed}"


def test_keys_of_others_pass_and_so_does_what_vllm_puts_there_itself() -> None:
    assert request_budget({"kv_transfer_params": {}, "budget": 1, "KV_x": 2, "kvcompile": 3, 7: 8}, HALF, 16) is None


@pytest.mark.parametrize("value", ["no", 2, None, []])
def test_a_switch_is_true_or_false(value: object) -> None:
    with pytest.raises(UsageError, match=r"^kv_prune is .*; allowed are true and false$"):
        request_budget({"kv_prune": value}, HALF, 16)
