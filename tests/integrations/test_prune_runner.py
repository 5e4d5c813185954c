"""What a runner of either version does around a step that prunes, with vLLM's own choice of CUDA graphs, on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, get_uniform_token_count
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kvcompile.integrations.vllm import integrity, prune_ranks, prune_runner, prune_runner_v2
from kvcompile.integrations.vllm.prune_jobs import Jobs
from kvcompile.integrations.vllm.prune_scheduler import ACKNOWLEDGED, PLANS, Step
from kvcompile.presets import NAME
from kvcompile.prune.plan import Plan

PLAN = Plan(tokens=65, released=2, block_size=16, epoch=3)
LAYERS = ("a", "b")
IDS = ["one", "two", "three"]  # as they come in a batch; the second ends its prompt with one token
REQUESTS = {"two": Step(PLAN, final=True)}
GRAPHS = [
    (CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.PIECEWISE),
    (CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.NONE),
]


def a_step(steps: dict[str, Step] | None = None, **fields: Any) -> SchedulerOutput:
    """One token of each request."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = dict.fromkeys(IDS, 1)
    output.total_num_scheduled_tokens = len(IDS)
    for name, value in fields.items():
        setattr(output, name, value)
    if steps is not None:
        setattr(output, PLANS, steps)
    return output


def configuration(mode: CUDAGraphMode) -> SimpleNamespace:
    compilation = SimpleNamespace(
        cudagraph_mode=mode,
        is_attention_compiled_piecewise=lambda: True,
        cudagraph_capture_sizes=[1, 2, 4, 8],
        max_cudagraph_capture_size=8,
        compile_sizes=[],
        cudagraph_specialize_lora=False,
        static_forward_context=dict.fromkeys(LAYERS),
        pass_config=SimpleNamespace(enable_sp=False),
    )
    return SimpleNamespace(
        compilation_config=compilation,
        additional_config={NAME: {"prune": {"enabled": True, "window_tokens": 4}}},
        speculative_config=None,
        lora_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        observability_config=SimpleNamespace(cudagraph_metrics=False),
    )


class Runner:
    """What both versions have, with layers that show each job its token; those `without` show none."""

    def __init__(self, mode: CUDAGraphMode) -> None:
        self.vllm_config = config = configuration(mode)
        self.compilation_config, self.parallel_config = config.compilation_config, config.parallel_config
        self.model_config = SimpleNamespace(
            get_num_layers=lambda parallel: len(LAYERS),
            get_num_attention_heads=lambda parallel: 4,
            get_num_kv_heads=lambda parallel: 2,
            get_head_size=lambda: 64,
            dtype=torch.bfloat16,
        )
        self.cache_config, self.device = SimpleNamespace(block_size=16), torch.device("cpu")
        self.without: set[str] = set()
        self.output = SimpleNamespace()
        self.graph: CUDAGraphMode | None = None

    def layers(self, jobs: dict[int, Any]) -> None:
        for layer in LAYERS:
            for row, job in jobs.items():
                if layer not in self.without:
                    job.observe(layer, torch.full((1, 1, 1), float(row)), torch.zeros(1), torch.zeros(1), 1.0)

    def profile_run(self) -> None:
        self.profiled = True

    def sample_tokens(self, grammar: None) -> Any:
        return self.output


class RunnerV1(Runner):
    _determine_batch_execution_and_padding = GPUModelRunner._determine_batch_execution_and_padding
    _is_uniform_decode = staticmethod(GPUModelRunner._is_uniform_decode)
    uniform_decode_query_len = 1

    def __init__(self, mode: CUDAGraphMode) -> None:
        super().__init__(mode)
        self.model_config.is_encoder_decoder = False
        self.cudagraph_dispatcher = CudagraphDispatcher(self.vllm_config)
        self.cudagraph_dispatcher.initialize_cudagraph_keys(mode)
        blocks = SimpleNamespace(np=torch.arange(1, 31, dtype=torch.int32).view(3, 10))
        table = SimpleNamespace(block_table=blocks, num_blocks_per_row=[4, 5, 6])
        places = {name: row for row, name in enumerate(IDS)}
        self.input_batch = SimpleNamespace(req_id_to_index=places, lora_id_to_lora_request={}, block_table=[table])
        self.requests = {name: SimpleNamespace(block_ids=([*range(1, 11)],)) for name in IDS}

    def _pad_for_sequence_parallelism(self, tokens: int) -> int:
        return tokens

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Nothing new."""

    def _build_attention_metadata(self) -> tuple[dict[str, Any], None]:
        shared = SimpleNamespace(jobs={})
        return dict.fromkeys(LAYERS, shared), None

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._update_states(scheduler_output)
        tokens = scheduler_output.num_scheduled_tokens
        self.graph, *_ = self._determine_batch_execution_and_padding(
            num_tokens=sum(tokens.values()),
            num_reqs=len(tokens),
            num_scheduled_tokens_np=None,
            max_num_scheduled_tokens=max(tokens.values()),
            use_cascade_attn=False,
        )
        metadata, _ = self._build_attention_metadata()
        self.layers(metadata["a"].jobs)


class ModelState:
    def prepare_attn(self, input_batch: Any) -> dict[str, Any]:
        return dict.fromkeys(LAYERS, SimpleNamespace(jobs={}))


def graphs(config: SimpleNamespace) -> CudaGraphManager:
    manager = object.__new__(CudaGraphManager)
    manager.compilation_config = config.compilation_config
    manager.cudagraph_mode = config.compilation_config.cudagraph_mode
    manager.max_num_reqs, manager.decode_query_len = config.scheduler_config.max_num_seqs, 1
    manager._graphs_captured, manager._candidates, manager._capture_descs = True, [], {}
    manager._init_candidates()
    return manager


class RunnerV2(Runner):
    def __init__(self, mode: CUDAGraphMode) -> None:
        super().__init__(mode)
        table = SimpleNamespace(gpu=torch.arange(1, 31, dtype=torch.int32).view(3, 10))
        counts = SimpleNamespace(np=torch.tensor([[6, 5, 4]]))
        self.block_tables = SimpleNamespace(block_tables=[table], num_blocks=counts)
        # Rows of the table are not those of a batch.
        self.req_states = SimpleNamespace(req_id_to_index={name: 2 - row for row, name in enumerate(IDS)})

    def load_model(self) -> None:
        self.model_state = ModelState()

    def initialize_kv_cache(self) -> None:
        self.cudagraph_manager = graphs(self.vllm_config)

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Nothing new."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self.update_requests(scheduler_output)
        tokens = scheduler_output.num_scheduled_tokens
        shape = len(tokens), sum(tokens.values()), max(tokens.values())
        self.graph = self.cudagraph_manager.dispatch(*shape[:2], get_uniform_token_count(*shape)).cg_mode
        metadata = self.model_state.prepare_attn(SimpleNamespace(req_ids=IDS))
        self.layers(metadata["a"].jobs)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prune_ranks, "get_tp_group", lambda: SimpleNamespace(world_size=1))


def pruning(version: int, mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE) -> Any:
    """A runner that prunes, whose selections keep nothing in particular; it notes what was shown and moved."""
    runner: Any = RunnerV1(mode) if version == 1 else RunnerV2(mode)
    (prune_runner if version == 1 else prune_runner_v2).install(runner)
    runner.shown, runner.moved = [], []

    def score(layer: str, queries: torch.Tensor, *_: Any) -> torch.Tensor:
        runner.shown.append(queries.flatten().tolist())
        return torch.zeros(1, PLAN.kept, dtype=torch.int32)

    def choose(scores: list[torch.Tensor], kept: int) -> list[torch.Tensor]:
        return scores

    def move(kept: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], plan: Plan) -> None:
        runner.moved.append((len(kept), plan))

    runner._jobs = Jobs(4, len(LAYERS), score, choose, move)
    if version == 2:
        runner.load_model()
        runner.initialize_kv_cache()
    return runner


def table_of(runner: Any, request_id: str) -> list[int]:
    """The row that the next step reads."""
    if isinstance(runner, RunnerV1):
        row = runner.input_batch.block_table[0].block_table.np[runner.input_batch.req_id_to_index[request_id]]
    else:
        row = runner.block_tables.block_tables[0].gpu[runner.req_states.req_id_to_index[request_id]]
    return row.tolist()


@pytest.mark.parametrize(("mode", "instead"), GRAPHS, ids=lambda mode: mode.name)
@pytest.mark.parametrize("version", [1, 2])
def test_a_last_chunk_of_one_token_among_decodes_is_not_replayed_as_a_graph_of_the_whole_model(
    version: int, mode: CUDAGraphMode, instead: CUDAGraphMode
) -> None:
    runner = pruning(version, mode)
    runner.execute_model(a_step())
    assert runner.graph == CUDAGraphMode.FULL
    # One that touches the window and does not end the prompt, then one that does.
    for final in (False, True):
        runner.execute_model(a_step({"two": Step(PLAN, final)}))
        assert runner.graph == instead
    assert runner.moved == [(len(LAYERS), PLAN)] and runner.shown == [[1.0, 1.0]] * 2
    runner.execute_model(a_step({}))
    assert runner.graph == CUDAGraphMode.FULL


@pytest.mark.parametrize("version", [1, 2])
def test_the_row_is_nulled_with_the_next_step_and_no_other(version: int) -> None:
    runner = pruning(version)
    before = {name: table_of(runner, name) for name in IDS}
    runner.execute_model(a_step(REQUESTS))
    assert {name: table_of(runner, name) for name in IDS} == before
    runner.execute_model(a_step())
    assert table_of(runner, "two") == [0, 0, *before["two"][2:]]
    assert [table_of(runner, name) for name in ("one", "three")] == [before["one"], before["three"]]
    if version == 1:  # what the row is made of should the request leave the batch and come again
        assert runner.requests["two"].block_ids[0][:3] == [0, 0, 3]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_word_is_on_what_the_scheduler_will_see_and_is_said_once(version: int, asynchronous: bool) -> None:
    runner, seen = pruning(version), SimpleNamespace()
    wrapped = {"_model_runner_output" if version == 1 else "model_runner_output": seen}
    runner.output = SimpleNamespace(**wrapped) if asynchronous else seen
    runner.execute_model(a_step(REQUESTS))
    assert runner.sample_tokens(None) is runner.output and getattr(seen, ACKNOWLEDGED) == {"two": 3}
    runner.output = SimpleNamespace()
    runner.execute_model(a_step())
    assert not hasattr(runner.sample_tokens(None), ACKNOWLEDGED)


@pytest.mark.parametrize("version", [1, 2])
def test_a_layer_that_did_not_score_leaves_everything_as_it_was(version: int) -> None:
    runner = pruning(version)
    before = table_of(runner, "two")
    runner.without = {"b"}
    runner.execute_model(a_step(REQUESTS))
    runner.execute_model(a_step())
    assert not runner.moved and table_of(runner, "two") == before
    assert not hasattr(runner.sample_tokens(None), ACKNOWLEDGED)


@pytest.mark.parametrize(
    "fields",
    [
        {"finished_req_ids": {"two"}},
        {"preempted_req_ids": {"two"}},
        {"scheduled_new_reqs": [SimpleNamespace(req_id="two")]},  # how runner V2 hears of a preemption, at the latest
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("version", [1, 2])
def test_whoever_ended_or_begins_anew_keeps_the_row_it_is_given(version: int, fields: dict[str, Any]) -> None:
    runner = pruning(version)
    before = table_of(runner, "two")
    runner.execute_model(a_step(REQUESTS))
    runner.execute_model(a_step(**fields))
    assert table_of(runner, "two") == before


@pytest.mark.parametrize("version", [1, 2])
def test_a_prompt_is_pruned_at_the_start_and_what_cannot_be_ends_it(version: int) -> None:
    runner = pruning(version)
    runner.profile_run()
    assert runner.profiled and not runner._jobs.take_released()
    runner.model_config.get_num_attention_heads = lambda parallel: 3
    with pytest.raises(ValueError, match="given 3 heads, allowed a multiple of the 2 KV heads"):
        runner.profile_run()


@pytest.mark.parametrize("version", [1, 2])
def test_the_check_of_the_books_reads_the_rows_of_either_runner(version: int) -> None:
    runner = pruning(version)
    runner.execute_model(a_step(REQUESTS))
    runner.execute_model(a_step())
    rows = integrity._rows(runner)
    assert rows == {name: table_of(runner, name)[: 4 + row] for row, name in enumerate(IDS)}
    assert rows["two"][:3] == [0, 0, 13]


def test_a_runner_of_the_other_version_is_refused() -> None:
    with pytest.raises(RuntimeError, match="needs vLLM's model runner V1; RunnerV2 has no _update_states and no"):
        prune_runner.install(RunnerV2(CUDAGraphMode.FULL_AND_PIECEWISE))
    with pytest.raises(RuntimeError, match="needs vLLM's model runner V2; RunnerV1 has no update_requests and no"):
        prune_runner_v2.install(RunnerV1(CUDAGraphMode.FULL_AND_PIECEWISE))


def test_vllms_own_objects_become_those_that_prune_and_have_the_methods_that_are_overridden() -> None:
    from vllm.v1.worker.gpu import cudagraph_utils, model_runner
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    def methods(pruning_class: type) -> list[str]:
        return [name for name, value in vars(pruning_class).items() if callable(value)]

    jobs = Jobs(4, len(LAYERS), lambda *_: None, lambda *_: [], lambda *_: None)
    for pruning_class, kind in (
        (prune_runner_v2.pruning_state(DefaultModelState, jobs), DefaultModelState),
        (prune_runner_v2.pruning_graphs(CudaGraphManager, jobs), CudaGraphManager),
        (
            prune_runner_v2.pruning_graphs(cudagraph_utils.ModelCudaGraphManager, jobs),
            cudagraph_utils.ModelCudaGraphManager,
        ),
    ):
        assert methods(pruning_class) and all(hasattr(kind, name) for name in methods(pruning_class))
        part = object.__new__(kind)
        part.__class__ = pruning_class
        assert isinstance(part, kind)
    for version, pruning_class, kind in (
        (prune_runner, prune_runner.PruningRunner, GPUModelRunner),
        (prune_runner_v2, prune_runner_v2.PruningRunnerV2, model_runner.GPUModelRunner),
    ):
        overridden = methods(pruning_class) + methods(prune_runner.PruningSteps)
        assert overridden and all(hasattr(kind, name) for name in overridden)
        runner = object.__new__(kind)
        vars(runner).update(vars(Runner(CUDAGraphMode.FULL_AND_PIECEWISE)))
        version.install(runner)
        assert isinstance(runner, pruning_class) and isinstance(runner, kind)
