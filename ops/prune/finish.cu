// Scores [G, T] of a stage from what the other kernels leave, zeros outside of the evictable positions [low, high). Sums are
// in a fixed order.
//
// Threads x positions.

#include "numeric.cuh"

constexpr int THREADS = 256;

// out[g, t] = sum over chunks of parts[chunk, g, t]. Grid: y KV heads.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prune_sum_chunks(const float* __restrict__ parts, int chunks, int length, int low, int high, float* __restrict__ out) {
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const int t = blockIdx.x * THREADS + threadIdx.x;
    if (t >= length) return;
    float sum = 0.0f;
    if (t >= low && t < high)
        for (int chunk = 0; chunk < chunks; ++chunk)
            sum += parts[(static_cast<long long>(chunk) * gridDim.y + blockIdx.y) * length + t];
    out[static_cast<long long>(blockIdx.y) * length + t] = sum;
}

// out[g, t] = mean over the heads h of g of max over |u - t| <= reach, 0 <= u < high, of sum over parts of
// sums[part, h, u] / window. Every mean is computed alike wherever it is read, so that ties are exact. Grid: y KV heads.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prune_pool_means(const float* __restrict__ sums, int parts, int ratio, int window, int reach, int length, int low,
                     int high, float* __restrict__ out) {
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const int t = blockIdx.x * THREADS + threadIdx.x;
    if (t >= length) return;
    float sum = 0.0f;
    if (t >= low && t < high)
        for (int i = 0; i < ratio; ++i) {
            const long long head = static_cast<long long>(blockIdx.y) * ratio + i;
            float most = 0.0f;
            for (int u = max(0, t - reach); u <= min(high - 1, t + reach); ++u) {
                float x = 0.0f;
                for (int part = 0; part < parts; ++part)
                    x += sums[(part * static_cast<long long>(gridDim.y) * ratio + head) * length + u];
                x = __fdiv_rn(x, static_cast<float>(window));
                most = x > most || x != x ? x : most;  // a NaN stays
            }
            sum += most;
        }
    out[static_cast<long long>(blockIdx.y) * length + t] = __fdiv_rn(sum, static_cast<float>(ratio));
}

// out[g, t] = mean over all query heads of attention[h, t], for every g.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prune_mean_heads(const float* __restrict__ attention, int heads, int kv_heads, int length, int low, int high,
                     float* __restrict__ out) {
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const int t = blockIdx.x * THREADS + threadIdx.x;
    if (t >= length) return;
    float sum = 0.0f;
    if (t >= low && t < high)
        #pragma unroll 8
        for (int h = 0; h < heads; ++h) sum += attention[static_cast<long long>(h) * length + t];
    sum = __fdiv_rn(sum, static_cast<float>(heads));
    for (int g = 0; g < kv_heads; ++g) out[static_cast<long long>(g) * length + t] = sum;
}
