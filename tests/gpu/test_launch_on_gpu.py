"""Kernels that are compiled and launched run: on the stream, in a captured graph, in another thread, as clusters."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from kvcompile.ops import launch

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)

SOURCE = """
#include "numeric.cuh"
extern "C" __global__ void scale(const float* x, float* out, int n, float factor, long long offset) {
    extern __shared__ float room[];
    numeric::wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    room[threadIdx.x] = i < n ? x[i] : 0.0f;
    if (i < n) out[i + offset] = room[threadIdx.x] * factor;
}
"""
CLUSTERS = """
extern "C" __global__ void clusters(int* out) {
    unsigned size;
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
    out[blockIdx.x] = size;
}
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "scale.cu"
    path.write_text(SOURCE)
    return path


def test_a_kernel_runs_on_the_current_stream_with_its_arguments(source: Path) -> None:
    scale = launch.kernel(source, "scale", GPU, signature="PPifq")
    assert launch.kernel(source, "scale", torch.device("cuda"), {}, signature="PPifq") is scale
    x, out = torch.randn(1000, device=GPU), torch.zeros(1003, device=GPU)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for programmatic in (False, True):
            scale((4, 1, 1), 256, (x, out, 1000, 2.5, 3), shared_bytes=1024, programmatic=programmatic)
    stream.synchronize()
    assert torch.equal(out[3:], x * 2.5) and not out[:3].any()


def test_a_captured_launch_is_replayed_with_the_data_of_the_day(source: Path) -> None:
    scale = launch.kernel(source, "scale", GPU, signature="PPifq")
    x, out = torch.zeros(512, device=GPU), torch.zeros(512, device=GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        scale((2, 1, 1), 256, (x, x, 512, 2.0, 0), shared_bytes=1024, programmatic=True)
        scale((2, 1, 1), 256, (x, out, 512, 3.0, 0), shared_bytes=1024, programmatic=True)
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, torch.full_like(out, 6 * value))


def test_a_kernel_obtained_during_a_capture_loads(source: Path) -> None:
    x, out = torch.ones(256, device=GPU), torch.zeros(256, device=GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale = launch.kernel(source, "scale", GPU, {"UNSEEN": 1}, signature="PPifq")
        scale((1, 1, 1), 256, (x, out, 256, 4.0, 0), shared_bytes=1024)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, x * 4)


def test_a_new_thread_can_launch(source: Path) -> None:
    scale = launch.kernel(source, "scale", GPU, signature="PPifq")
    x, out = torch.ones(256, device=GPU), torch.zeros(256, device=GPU)
    torch.cuda.synchronize()
    thread = threading.Thread(target=scale, args=((1, 1, 1), 256, (x, out, 256, 4.0, 0)), kwargs={"shared_bytes": 1024})
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(out, x * 4)


def test_dynamic_shared_memory_goes_up_to_what_the_device_has_and_no_further(source: Path) -> None:
    scale = launch.kernel(source, "scale", GPU, signature="PPifq")
    x, out = torch.ones(256, device=GPU), torch.zeros(256, device=GPU)
    most = torch.cuda.get_device_properties(GPU).shared_memory_per_block_optin
    scale((1, 1, 1), 256, (x, out, 256, 4.0, 0), shared_bytes=most)
    torch.cuda.synchronize()
    assert torch.equal(out, x * 4)
    with pytest.raises(RuntimeError, match=r"launch of scale \(grid .*CUDA_ERROR_INVALID_VALUE"):
        scale((1, 1, 1), 256, (x, out, 256, 4.0, 0), shared_bytes=most + 4)


def test_clusters_form(tmp_path: Path) -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("clusters need compute capability 9.0")
    source = tmp_path / "clusters.cu"
    source.write_text(CLUSTERS)
    out = torch.zeros(16, dtype=torch.int32, device=GPU)
    launch.kernel(source, "clusters", GPU, signature="P")((16, 1, 1), 32, (out,), cluster=8)
    assert out.tolist() == [8] * 16


def test_the_device_holds_a_cluster_for_every_few_multiprocessors(source: Path) -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("clusters need compute capability 9.0")
    scale = launch.kernel(source, "scale", GPU, signature="PPifq")
    found = torch.cuda.get_device_properties(GPU)
    alone = found.shared_memory_per_block_optin
    for cluster in (2, 4, 8):
        held = scale.resident_clusters(cluster, 256, alone)
        assert 0 < held <= found.multi_processor_count // cluster


def test_a_kernel_that_the_source_does_not_have_is_refused_with_those_it_has(source: Path) -> None:
    with pytest.raises(ValueError, match="name: given 'scales', allowed the kernels of .*: .*scale"):
        launch.kernel(source, "scales", GPU, signature="P")


@pytest.mark.parametrize("signature", ["PPif", "PPiff", "PPifqP"])
def test_a_signature_that_is_not_the_kernels_is_refused(source: Path, signature: str) -> None:
    with pytest.raises(ValueError, match=r"the parameters of scale take \[8, 8, 4, 4, 8\] bytes"):
        launch.kernel(source, "scale", GPU, signature=signature)


def test_a_kernel_of_another_device_is_launched_there(source: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    other = torch.device("cuda", 1)
    x, out = torch.ones(256, device=other), torch.zeros(256, device=other)
    launch.kernel(source, "scale", other, signature="PPifq")((1, 1, 1), 256, (x, out, 256, 4.0, 0), shared_bytes=1024)
    assert torch.cuda.current_device() == 0
    assert torch.equal(out, x * 4)
