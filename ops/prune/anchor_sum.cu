// The anchor of every row from its parts (prune_anchor), as fp16 under a power of two, and what else scoring asks of a row.
//
//   Y[g, chunk, row, :]       = sum over splits of partial 2^(m - peak) U / 2^UP / sum,    peak = max over splits of m
//   anchors[g, chunk, row, :] = Y / 2^e, the greatest of it in [2^14, 2^15)
//   facts[g, chunk, row]      = (peak, 1 / sum, 2^(e - UP) / sum): see prune_score
//
// A warp for each row. Defines: D. Grid: x rows / 8.

#define ROWS 32  // of no importance here
#define DTYPE 0
#include "observe.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prune_anchor_sum(const float2* __restrict__ stats, const float* __restrict__ units, const float* __restrict__ partial,
                     int splits, int kv_heads, int rows, unsigned* __restrict__ anchors,
                     float4* __restrict__ facts) {
    constexpr int PARTS = (D / 4 + 31) / 32;  // of 4 channels, for a lane
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const int lane = threadIdx.x & 31, row = blockIdx.x * WARPS + (threadIdx.x >> 5);
    if (row >= rows) return;
    const int head = row / (rows / kv_heads);
    const float2 found = combined(stats + row, splits, rows);
    const float over_sum = inverse(found.y);
    float4 sum[PARTS];
    #pragma unroll
    for (int i = 0; i < PARTS; ++i) sum[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int base = 0; base < splits; base += 32) {
        float factor = 0.0f;  // of one split for each lane
        if (base + lane < splits)
            factor = exp2_fast(stats[static_cast<long long>(base + lane) * rows + row].x - found.x) *
                     units[(base + lane) * kv_heads + head] * (DOWN * over_sum);
        #pragma unroll 8
        for (int split = base; split < min(splits, base + 32); ++split) {
            const float f = __shfl_sync(~0u, factor, split - base);
            #pragma unroll
            for (int i = 0; i < PARTS; ++i) {
                const int at = i * 32 + lane;
                if (at >= D / 4) continue;
                const long long from = (static_cast<long long>(split) * rows + row) * (D / 4) + at;
                const float4 x = reinterpret_cast<const float4*>(partial)[from];
                sum[i].x += x.x * f, sum[i].y += x.y * f, sum[i].z += x.z * f, sum[i].w += x.w * f;
            }
        }
    }
    float greatest = 0.0f;
    #pragma unroll
    for (int i = 0; i < PARTS; ++i)
        greatest = fmaxf(greatest, fmaxf(fmaxf(fabsf(sum[i].x), fabsf(sum[i].y)), fmaxf(fabsf(sum[i].z), fabsf(sum[i].w))));
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
