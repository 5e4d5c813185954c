"""The KV-length-aware scheduler over whole traces with a simulated worker: what it promises, counted."""

from __future__ import annotations

import random
import statistics

import pytest

from kvcompile.integrations.vllm.replay import Replay
from kvcompile.integrations.vllm.scheduler import LengthAwareAsyncScheduler, LengthAwareScheduler
from kvcompile.schedule.trace import Arrival
from kvcompile.tools.schedule_mixes import MIXES
from tests.integrations.replays import STEP, assert_blocks_add_up, pressing, replay_of, scheduler_of

SYNC_OR_NOT = pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])


@SYNC_OR_NOT
def test_every_request_gets_all_its_tokens_and_gives_all_its_blocks_back(asynchronous):
    trace = pressing(150)
    done = replay_of(trace, 200, asynchronous=asynchronous)
    expected = LengthAwareAsyncScheduler if asynchronous else LengthAwareScheduler
    assert type(done.scheduler) is expected
    assert [life.tokens for life in done.outcome.lives] == [arrival.output_tokens for arrival in trace]
    assert done.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 199
    assert not done.scheduler.running and not done.scheduler.waiting and not done.scheduler.requests


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["prefix caching", "no prefix caching"])
def test_blocks_add_up_over_ten_thousand_requests_with_random_aborts(prefix_caching):
    rng = random.Random(7)
    trace = [
        Arrival(i * 0.008, 40 + rng.randrange(60), rng.randint(1, 60), 64, rng.randrange(5) * 131, rng.choice([0, 32]))
        for i in range(10_000)
    ]
    steps = 0

    def check_and_abort(replay: Replay) -> None:
        nonlocal steps
        steps += 1
        if rng.random() < 0.15:
            alive = list(replay.scheduler.requests)
            replay.abort(int(name) for name in rng.sample(alive, min(len(alive), rng.randint(0, 4))))
        assert_blocks_add_up(replay.scheduler)

    done = replay_of(
        trace,
        120,
        after_step=check_and_abort,
        options={"horizon_steps": 1, "reserve_ratio": 0},
        enable_prefix_caching=prefix_caching,
    )
    aborted = sum(life.aborted for life in done.outcome.lives)
    # Some of each: preempted, gone while waiting, gone while running.
    assert steps > 2000 and aborted > 500 and done.outcome.preemptions > 10
    assert any(life.aborted and life.tokens == 0 for life in done.outcome.lives)
    for life in done.outcome.lives:
        assert life.aborted or life.tokens == life.arrival.output_tokens
    assert done.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 119


def _assert_nobody_is_preempted_within(horizon, outcome):
    admissions = sorted({step for step, _ in outcome.admitted})
    for step, _ in outcome.preempted:
        latest = max(other for other in admissions if other < step)
        assert step - latest > horizon


@SYNC_OR_NOT
@pytest.mark.parametrize("horizon", [1, 16, 50])
@pytest.mark.parametrize("budget", [1024, 64], ids=["whole prompts", "chunks"])
def test_nobody_is_preempted_within_the_horizon_of_an_admission(asynchronous, horizon, budget):
    options = {"horizon_steps": horizon, "reserve_ratio": 0}
    outcome = replay_of(
        pressing(200), 150, options=options, asynchronous=asynchronous, max_num_batched_tokens=budget
    ).outcome
    _assert_nobody_is_preempted_within(horizon, outcome)


@SYNC_OR_NOT
@pytest.mark.parametrize("free", [0, 2, 4, 6])
def test_a_long_prompt_with_a_short_answer_beside_growing_chats_has_nobody_preempted_within_the_horizon(
    asynchronous, free
):
    """Its blocks come back 8 tokens after its first, which takes 25 steps: not within the horizon."""
    trace = [Arrival(0.0, 155 + i, 600, 600) for i in range(8)] + [Arrival(0.2, 50_000, 8, 8)]
    fields = {"max_model_len": 131072, "max_num_batched_tokens": 2048, "max_num_seqs": 64}
    blocks = 1 + 3125 + 8 * 12 + free  # the document, and the chats when it comes
    done = replay_of(trace, blocks, options={"reserve_ratio": 0}, asynchronous=asynchronous, **fields)
    assert all(life.tokens == life.arrival.output_tokens for life in done.outcome.lives)
    _assert_nobody_is_preempted_within(32, done.outcome)


@SYNC_OR_NOT
@pytest.mark.parametrize("seed", range(4))
def test_prompts_of_many_steps_with_few_tokens_to_come_have_nobody_preempted_within_the_horizon(asynchronous, seed):
    rng = random.Random(seed)
    chats = [Arrival(rng.random(), rng.randint(20, 200), 300, 300) for _ in range(30)]
    documents = [
        Arrival(3 * rng.random(), rng.randint(500, 900), n, n) for n in [rng.randint(1, 10) for _ in range(20)]
    ]
    options = {"horizon_steps": rng.choice([16, 32, 60]), "reserve_ratio": 0}
    fields = {"max_model_len": 2048, "max_num_seqs": 32, "long_prefill_token_threshold": 16}
    done = replay_of(chats + documents, 150, options=options, asynchronous=asynchronous, **fields)
    _assert_nobody_is_preempted_within(options["horizon_steps"], done.outcome)


def test_a_horizon_as_long_as_the_longest_answer_preempts_nobody():
    trace = pressing(200)
    assert replay_of(trace, 150, stock=True).outcome.preemptions > 20
    assert replay_of(trace, 150, options={"horizon_steps": 400, "reserve_ratio": 0}).outcome.preemptions == 0


def test_the_reserve_is_never_given_to_a_newcomer():
    scheduler, config = scheduler_of(201, options={"horizon_steps": 1, "reserve_ratio": 0.25}, max_num_seqs=512)
    replay = Replay(scheduler, config, STEP)
    free_after_admission = []

    def note(replay: Replay) -> None:
        if replay.outcome.admitted and replay.outcome.admitted[-1][0] == replay.outcome.steps:
            free_after_admission.append(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    replay.after_step = note
    replay.run(pressing(100))
    assert len(free_after_admission) > 10
    assert min(free_after_admission) >= 0.25 * 200 - config.scheduler_config.max_num_seqs // 512


@pytest.mark.parametrize("name", [name for name, mix in MIXES.items() if mix.pressure])
def test_under_pressure_it_preempts_far_less_than_vllm_and_first_tokens_come_no_later(name):
    """The benchmark's mixes at a third of their size; times are the simulated clock's."""
    mix = MIXES[name]
    fields = {"max_model_len": 16384, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    trace = mix.trace(200, seed=1)
    stock, ours = (replay_of(trace, mix.blocks // 3, stock=stock, **fields).outcome for stock in (True, False))
    assert stock.preemptions > 10
    assert ours.preemptions <= 0.67 * stock.preemptions
    assert ours.recomputed_tokens <= 0.67 * stock.recomputed_tokens
    assert sum(life.tokens for life in ours.lives) == sum(life.tokens for life in stock.lives)
    waits = [statistics.mean(life.first_token_s - life.arrival.time_s for life in o.lives) for o in (ours, stock)]
    assert waits[0] <= 1.1 * waits[1]


@SYNC_OR_NOT
def test_without_pressure_it_schedules_exactly_as_vllm(asynchronous):
    trace = MIXES["calm"].trace(60, seed=1)
    fields = {"max_model_len": 16384, "asynchronous": asynchronous}
    stock, ours = (replay_of(trace, 30_000, stock=stock, **fields).outcome for stock in (True, False))
    assert ours.lives == stock.lives
    assert (ours.steps, ours.seconds, ours.admitted) == (stock.steps, stock.seconds, stock.admitted)


def test_a_pool_hardly_larger_than_one_request_serves_them_one_after_another():
    trace = [Arrival(0.0, 150, 60, 60) for _ in range(5)]
    outcome = replay_of(trace, 15, max_model_len=224).outcome
    assert [life.tokens for life in outcome.lives] == [60] * 5
    assert outcome.preemptions == 0


@pytest.mark.parametrize("tokens", [15, 16, 17, 31, 32, 33])
def test_prompts_at_the_edge_of_a_block_are_counted_to_the_block(tokens):
    done = replay_of([Arrival(0.0, tokens, 40, 40) for _ in range(60)], 60, options={"horizon_steps": 40})
    assert [life.tokens for life in done.outcome.lives] == [40] * 60
    assert done.outcome.preemptions == 0


def test_everything_running_can_be_preempted_from_outside_and_goes_on():
    def reset_once(replay: Replay) -> None:
        if replay.outcome.steps == 40:
            assert replay.scheduler.running
            assert replay.scheduler.reset_prefix_cache(reset_running_requests=True)
            # vLLM throws away what is in flight then; so does this worker.
            assert not replay.scheduler.running

    trace = pressing(30)
    done = replay_of(trace, 300, after_step=reset_once, asynchronous=False)
    assert [life.tokens for life in done.outcome.lives] == [arrival.output_tokens for arrival in trace]


@pytest.mark.parametrize("free", [20, 24, 28, 32])
def test_a_long_prompt_does_not_take_a_steps_tokens_from_those_that_decode(free):
    """Where blocks are few: victims are found by what they hold, and the document holds most."""
    trace = [Arrival(0.0, 155 + i, 600, 600) for i in range(8)] + [Arrival(0.2, 120_000, 300, 300)]
    fields = {"max_model_len": 131072, "max_num_batched_tokens": 2048, "max_num_seqs": 64}
    blocks = 1 + 7500 + 8 * 12 + free
    scheduler, config = scheduler_of(blocks, options={"reserve_ratio": 0}, asynchronous=False, **fields)
    stepped, schedule = [], scheduler.schedule

    def watched():
        decoding = {request.request_id for request in scheduler.running if request.num_output_tokens}
        output = schedule()
        stepped.append(decoding <= output.num_scheduled_tokens.keys() | (output.preempted_req_ids or set()))
        return output

    scheduler.schedule = watched
    assert Replay(scheduler, config, STEP).run(trace).lives[-1].tokens == 300
    assert all(stepped)
