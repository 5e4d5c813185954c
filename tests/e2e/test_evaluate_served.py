"""`kvcompile evaluate --endpoint` against a real server that prunes: budgets reach it, and answers are scored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcompile import cli
from kvcompile.tools.prose import prose
from kvcompile.tools.server import VllmServer
from tests.tools import longbench_sample
from tests.tools.longbench_sample import sample

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1500)]

LENGTH, BUDGET, BLOCK = 700, 100, 16
ARGUMENTS = (
    *("--compilation-config", "kvcompile", "-cc.kvcompile.prune.enabled=true", "--enforce-eager"),
    *("--block-size", str(BLOCK), "--kv-cache-memory-bytes", str(256 << 20)),
    *("--max-model-len", "2048", "--max-num-seqs", "8"),
)


@pytest.fixture(scope="module")
def server(
    smollm2_checkpoint: Path, compile_caches: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    log = tmp_path_factory.mktemp("evaluate") / "log"
    with VllmServer(smollm2_checkpoint, ARGUMENTS, log=log, environment=compile_caches) as server:
        server.wait_until_ready(500)
        yield server


def _means(path: Path, metric: str) -> dict[tuple[str, str], float]:
    rows = json.loads(path.read_text())["rows"]
    return {(row["case"], row["system"]): row["mean"] for row in rows if row["metric"] == metric}


def test_one_server_gives_what_is_found_at_each_budget(
    server: VllmServer, smollm2_checkpoint: Path, tmp_path: Path
) -> None:
    target, before = tmp_path / "x.json", server.counted("pruned_tokens")
    asked = ["--endpoint", f"ours={server.url}", "--task", "single", "--position", "last", "--length", str(LENGTH)]
    few = ["--samples", "3", "--answer-tokens", "32", "--budget", str(BUDGET), "--budget", "4096"]
    command = ["evaluate", "retrieval", str(smollm2_checkpoint), *asked, *few, "--json", str(target)]
    assert cli.main(command) == 0
    # The three of the small budget alone are pruned: not those that say kv_prune: false.
    assert server.counted("pruned_tokens") - before == 3 * ((LENGTH - BUDGET) // BLOCK * BLOCK)
    means = _means(target, "contained")
    whole = means["last, 4096 tokens", "ours, whole"]
    assert whole >= 0.3  # at least one of three
    assert abs(means["last, 4096 tokens", "ours"] - whole) < 0.35  # the same prompts, in other batches
    assert means[f"last, {BUDGET} tokens", "ours"] <= whole


def test_served_perplexity_is_about_that_of_the_checkpoint(
    server: VllmServer, smollm2_checkpoint: Path, tmp_path: Path
) -> None:
    text, target = tmp_path / "text.txt", tmp_path / "x.json"
    text.write_text(prose()[:3000], encoding="utf-8")
    found = []
    for more in ([], ["--endpoint", f"ours={server.url}"]):
        command = ["evaluate", "perplexity", str(smollm2_checkpoint), str(text), *more, "--json", str(target)]
        assert cli.main(command) == 0
        found += _means(target, "nll").values()
    assert len(found) == 2 and abs(found[0] - found[1]) < 0.05


def test_longbench_s_format_is_served_as_chat_and_as_plain_text(
    server: VllmServer, smollm2_checkpoint: Path, tmp_path: Path
) -> None:
    tasks = {
        "hotpotqa": [sample("Ann lives in Rome. Bo lives in Oslo.", "In which city does Bo live?", ["Oslo"])] * 2,
        "samsum": [sample("Dialogue: A: Hello B: Hello\nSummary: They say hello.\n\n" * 5, "Summary:", ["hello"])],
    }
    data, target = longbench_sample.write(tmp_path / "data", tasks), tmp_path / "x.json"
    asked = ["--endpoint", f"ours={server.url}", "--budget", "100", "--json", str(target)]
    assert cli.main(["evaluate", "longbench", str(smollm2_checkpoint), str(data), *asked]) == 0
    means = _means(target, "score")
    assert means["hotpotqa, 100 tokens", "ours, whole"] > 0  # "Oslo" is among the words that it says
    assert ("all tasks, 100 tokens", "ours") in means


def test_a_budget_that_the_server_refuses_is_one_line(server: VllmServer, smollm2_checkpoint: Path, capsys) -> None:
    asked = ["--endpoint", server.url, "--task", "single", "--length", str(LENGTH), "--budget", "20"]
    assert cli.main(["evaluate", "retrieval", str(smollm2_checkpoint), *asked]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "/v1/completions answers 400: kv_budget_tokens is 20; allowed are " in error
