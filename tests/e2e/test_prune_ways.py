"""Ways to ask that vLLM has beside a plain prompt, with pruning: each works, or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcompile.tools import http_json
from kvcompile.tools.server import VllmServer
from tests import byte_tokenizer
from tests.e2e.test_prune_served import BUDGET, OPTIONS
from tests.engine import run_python
from tests.pruned_engine import FIELDS
from tests.served_trace import random_llama

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1500)]

# Arguments: the model, kvcompile's options and fields of LLM as JSON. Ids are used as they are given.
SCRIPT = """
    import json, os, random, sys
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.sampling_params import StructuredOutputsParams
    from kvcompile.integrations.vllm.integrity import check_integrity
    from kvcompile.presets import compilation_config

    model, options, fields = json.loads(sys.argv[1])
    options = {"additional_config": {"kvcompile": options}, "num_gpu_blocks_override": 100}
    llm = LLM(model, compilation_config=compilation_config(mode=0), disable_log_stats=False, **options, **fields)
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    scheduler, runner = core.scheduler, core.model_executor.driver_worker.worker.model_runner
    pool = scheduler.kv_cache_manager.block_pool

    def add(name, length, **sampling):
        rng = random.Random(length)
        prompt = TokensPrompt(prompt_token_ids=[rng.randint(3, 96) for _ in range(length)])
        given = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, **sampling}
        engine.add_request(name, prompt, SamplingParams(**given))

    def run(name, each=lambda step: None):
        before, answers, step = scheduler.released_blocks, {}, 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                own = answers.setdefault(output.request_id, {})
                for answer in output.outputs:
                    own[answer.index] = [len(answer.token_ids), answer.finish_reason, answer.text]
            step += 1
            check_integrity(scheduler, runner)
            each(step)
            check_integrity(scheduler, runner)
        left = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        answers = {name: list(own.values()) for name, own in answers.items()}
        said = [answers, scheduler.released_blocks - before, left + len(scheduler.pruning.plans)]
        print("RUN", json.dumps([name, *said]), flush=True)

    def again(step):
        if step in (1, 2, 4):
            engine.abort_request(["0", "1"])
            for name in ("0", "1"):
                add(name, 300 + 10 * step + int(name))

    for name in ("0", "1", "2"):
        add(name, 300)
    run("same id", again)

    add("n", 200, n=3, temperature=1.0)
    run("n")

    for i in range(4):
        add(f"{i}", 200 + i, max_tokens=60, stop=["77"], temperature=1.0)
    run("stop")

    add("choice", 200, structured_outputs=StructuredOutputsParams(choice=["abc", "xyz"]), ignore_eos=False)
    add("regex", 210, structured_outputs=StructuredOutputsParams(regex="[0-9]{5}"), ignore_eos=False)
    run("structured")

    def pause(step):
        if step in (1, 3):
            core.pause_scheduler("keep")  # what a sleep does first: everything is preempted, the prefix cache is reset
            engine.step()
            core.resume_scheduler()

    for i in range(4):
        add(f"{i}", 300 + i)
    run("pause", pause)

    llm.sleep(level=0)
    llm.wake_up(tags=["scheduling"])
    add("awake", 300)
    run("sleep")
    try:
        llm.embed([TokensPrompt(prompt_token_ids=[3, 4, 5])])
    except ValueError as error:
        print("EMBED", error)
"""


@pytest.fixture(scope="module")
def model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = random_llama(tiny_llama / "config.json", tmp_path_factory.mktemp("ways") / "model")
    byte_tokenizer.save(made, json.loads((made / "config.json").read_text())["vocab_size"])
    return made


def released(tokens: int) -> int:
    return (tokens - BUDGET) // 16


def test_ids_used_again_several_answers_stop_strings_grammars_pauses_and_sleep_work(model: Path) -> None:
    said = run_python(SCRIPT, json.dumps([str(model), OPTIONS, FIELDS]), timeout_s=900)
    runs = [json.loads(line.removeprefix("RUN ")) for line in said.splitlines() if line.startswith("RUN ")]
    answers, freed, left = ({name: part for name, *parts in runs for part in [parts[i]]} for i in range(3))
    assert list(answers) == ["same id", "n", "stop", "structured", "pause", "sleep"]
    assert set(left.values()) == {0}
    assert all([count for count, *_ in own] == [8] for own in answers["same id"].values())
    # The last bearers of the two ids, and whoever before them got so far.
    assert freed["same id"] >= released(300) + released(340) + released(341)
    assert [count for count, *_ in answers["n"]["n"]] == [8, 8, 8] and freed["n"] == 3 * released(200)
    assert freed["stop"] == sum(released(200 + i) for i in range(4))
    assert all(count == 60 or reason == "stop" for ((count, reason, _),) in answers["stop"].values())
    assert not any("77" in text for ((_, _, text),) in answers["stop"].values())
    ((_, reason, choice),), ((_, _, digits),) = answers["structured"]["choice"], answers["structured"]["regex"]
    assert reason == "stop" and choice in ("abc", "xyz") and len(digits) == 5 and digits.isdigit()
    assert freed["structured"] == released(200) + released(210)
    assert len(answers["pause"]) == 4 and freed["pause"] > 4 * released(300)
    assert [count for count, *_ in answers["sleep"]["awake"]] == [8] and freed["sleep"] == released(300)
    assert "EMBED LLM.encode() is only supported for pooling models" in said


def test_a_server_answers_400_to_what_a_request_asks_wrongly_with_the_line_and_goes_on(
    model: Path, tmp_path: Path
) -> None:
    options = ("--compilation-config", json.dumps({"kvcompile": OPTIONS, "mode": 0}), "--enforce-eager")
    size = ("--dtype", "float32", "--block-size", "16", "--max-model-len", "512", "--kv-cache-memory-bytes", "32M")
    with VllmServer(model, (*options, *size, "--max-num-seqs", "4"), log=tmp_path / "log") as server:
        server.wait_until_ready(600)

        def ask(given: dict[str, object]) -> tuple[int, str]:
            body = {"prompt": list(range(3, 203)), "max_tokens": 2, "temperature": 0, "vllm_xargs": given}
            try:
                answer = http_json.ask(f"{server.url}/v1/completions", body)
            except http_json.Refused as refused:
                return refused.status, json.loads(refused.text)["error"]["message"]
            return 200, str(answer["usage"]["completion_tokens"])

        wrong = (1, 0, -1, 35, "x", 1e9, 544.0, 10**30, True)
        for status, line in (ask({"kv_budget_tokens": value}) for value in wrong):
            assert status == 400 and line.startswith("kv_budget_tokens is "), line
            assert "; allowed are integers of at least 36, " in line and "\n" not in line
        assert ask({"kv_budget_token": 100}) == (
            400,
            "'kv_budget_token' is unknown; allowed of what begins with kv_ are kv_budget_tokens and kv_prune; correct "
            "it, or leave it out",
        )
        assert ask({"kv_prune": "maybe"}) == (400, "kv_prune is 'maybe'; allowed are true and false")
        for right in ({"kv_budget_tokens": 100}, {"kv_prune": False}, {"kv_prune": True}, {"other": 1}, {}):
            assert ask(right) == (200, "2")
