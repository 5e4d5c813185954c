// The anchor of every row from its parts (prune_anchor), as fp16 under a power of two, and what else scoring asks of a row.
//
//   anchors[g, chunk, row, :] = Y / 2^e, the greatest of it in [2^14, 2^15)
//   facts[g, chunk, row]      = (peak, 1 / sum, 2^(e - UP) / sum): see prune_score
//
// A warp for each row. Defines: D. Grid: x rows / 8.

#define ROWS 32  // of no importance here
#define DTYPE 0
#include "observe.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prune_anchor_sum(const float2* __restrict__ stats, const float* __restrict__ value_peaks, int stats_splits,
                     const float* __restrict__ partial, int splits, int kv_heads, int rows, unsigned* __restrict__ anchors,
                     float4* __restrict__ facts) {
    constexpr int PARTS = (D / 4 + 31) / 32;  // of 4 channels, for a lane
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const int lane = threadIdx.x & 31, row = blockIdx.x * WARPS + (threadIdx.x >> 5);
    if (row >= rows) return;
    const int head = row / (rows / kv_heads);
    const float2 found = combined(stats + row, stats_splits, rows);
    float value_peak = 0.0f;
    for (int i = lane; i < stats_splits; i += 32) value_peak = fmaxf(value_peak, value_peaks[i * kv_heads + head]);
    #pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) value_peak = fmaxf(value_peak, __shfl_xor_sync(~0u, value_peak, apart));
    const float over_sum = inverse(found.y), factor = value_peak * DOWN * over_sum;
    float4 sum[PARTS];
    float greatest = 0.0f;
    #pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        sum[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const int at = i * 32 + lane;
        if (at < D / 4)
            #pragma unroll 4
            for (int split = 0; split < splits; ++split) {
                const long long from = (static_cast<long long>(split) * rows + row) * (D / 4) + at;
                const float4 x = reinterpret_cast<const float4*>(partial)[from];
                sum[i].x += x.x, sum[i].y += x.y, sum[i].z += x.z, sum[i].w += x.w;
            }
        sum[i].x *= factor, sum[i].y *= factor, sum[i].z *= factor, sum[i].w *= factor;
        greatest = fmaxf(greatest, fmaxf(fmaxf(fabsf(sum[i].x), fabsf(sum[i].y)), fmaxf(fabsf(sum[i].z), fabsf(sum[i].w))));
    }
    #pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, apart));
    const float power = inverse_power_below(greatest), down = power * 16384.0f;
    #pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        const int at = i * 32 + lane;
        if (at < D / 4)
            reinterpret_cast<uint2*>(anchors)[static_cast<long long>(row) * (D / 4) + at] =
                make_uint2(pack_f16(sum[i].x * down, sum[i].y * down), pack_f16(sum[i].z * down, sum[i].w * down));
    }
    if (lane == 0) facts[row] = make_float4(found.x, over_sum, over_sum * DOWN / down, 0.0f);
}
