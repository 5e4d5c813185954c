// AnDPro's anchor, in parts: pooled weights times values over a split of the evictable positions [low, high).
//
//   partial[split, g, chunk, row, :] = sum_t pool(2^(l[t] - peak))[t] v8[t] sv[t] / V * 2^UP,    V = max_t sv[t]
//
// Dividing by V keeps what is rounded to fp16 in its range, whatever the scales sv are. prune_anchor_sum puts the parts
// together. A tile overlaps its neighbours by REACH tokens on either side, whose values are not read.
//
// Defines: those of pool.cuh. Grid: x splits, y KV heads, z chunks. Shared memory: rows, tiles of keys and of values with
// 4 words behind, their weights, and the pooled ones.

#include "pool.cuh"

// A warp has 32 channels, in words of 4, and ROWS / ROW_GROUPS rows of the product.
constexpr int CHANNEL_GROUPS = (D + 31) / 32, ROW_GROUPS = WARPS / CHANNEL_GROUPS;
constexpr int WARP_ROWS = ROWS / ROW_GROUPS;
constexpr int POOLED_PITCH = TOKENS / 2 + 4;
constexpr int VALUE_TAIL = 4;  // words behind the last vector that a head size of 80 reads, and multiplies into nothing

extern "C" __global__ void __launch_bounds__(THREADS, D > 128 || REACH > 8 ? 1 : 2)
    prune_anchor(REQUEST_PARAMETERS, int low, int high, const float2* __restrict__ stats,
                 const float* __restrict__ value_peaks, int stats_splits, float* __restrict__ partial) {
    extern __shared__ __align__(16) unsigned shared[];
    __shared__ Rows rows;
    __shared__ float key_scales[TOKENS], value_scales[TOKENS], peaks[ROWS];
    unsigned* const vectors = shared;
    unsigned* const keys = vectors + ROWS * ROW_PITCH;
    unsigned* const values = keys + TOKENS * PITCH;
    unsigned* const weights = values + TOKENS * PITCH + VALUE_TAIL;
    unsigned* const pooled = weights + TOKENS * WEIGHT_PITCH;
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const Request r = REQUEST;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    load_rows(vectors, rows, r);
    const long long chunk = static_cast<long long>(blockIdx.y) * gridDim.z + blockIdx.z;
    const long long all_rows = static_cast<long long>(gridDim.y) * gridDim.z * ROWS;
    for (int row = warp; row < ROWS; row += WARPS) {
        const float2 found = combined(stats + chunk * ROWS + row, stats_splits, all_rows);
        if (lane == 0) peaks[row] = found.x;
    }
    float value_peak = 0.0f;
    for (int i = lane; i < stats_splits; i += 32) value_peak = fmaxf(value_peak, value_peaks[i * gridDim.y + blockIdx.y]);
    #pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) value_peak = fmaxf(value_peak, __shfl_xor_sync(~0u, value_peak, apart));
    if (value_peak == 0.0f) value_peak = 1.0f;  // nothing but zeros, under scales that kv8_store does not write

    float sum[2][WARP_ROWS / 8][4];
    #pragma unroll
    for (int m = 0; m < 2; ++m)
        #pragma unroll
        for (int n = 0; n < WARP_ROWS / 8; ++n)
            #pragma unroll
            for (int c = 0; c < 4; ++c) sum[m][n][c] = 0.0f;
    const int channels = warp % CHANNEL_GROUPS, row_group = warp / CHANNEL_GROUPS;
    const int of = lane >> 2, quarter = lane & 3;
    const int tiles = (high - low + INNER - 1) / INNER;
    const int end = split_begin(blockIdx.x + 1, tiles);
    for (int tile = split_begin(blockIdx.x, tiles); tile < end; ++tile) {
        const int inner = low + tile * INNER, begin = inner - REACH;
        __syncthreads();
        load_tile(keys, key_scales, r, KEYS, begin, 0, length);
        load_tile(values, value_scales, r, VALUES, begin, inner, min(inner + INNER, high));
        copies_arrive();
        __syncthreads();
        {
            float out[2][NT][4];
            multiply(out, keys, vectors);
            write_weights(weights, out, key_scales, rows, peaks, begin);
        }
        __syncthreads();
        {
            unsigned x[RUN + 2 * REACH];
            pool(x, weights);
            #pragma unroll
            for (int i = 0; i < RUN; i += 2) {
                const int token = pool_token() + i;
                const float2 first = numeric::Fp16::unpack(x[i]), second = numeric::Fp16::unpack(x[i + 1]);
                const float a = __fdiv_rn(value_scales[token], value_peak);
                const float b = __fdiv_rn(value_scales[token + 1], value_peak);
                unsigned* const to = pooled + 2 * pool_pair() * POOLED_PITCH + token / 2;
                to[0] = pack_f16(first.x * a, second.x * b);
                to[POOLED_PITCH] = pack_f16(first.y * a, second.y * b);
            }
        }
        __syncthreads();
        if (row_group < ROW_GROUPS) {
            const unsigned* const row = pooled + (row_group * WARP_ROWS + of) * POOLED_PITCH + quarter;
            #pragma unroll 2
            for (int k = 0; k < TOKENS / 16; ++k) {
                unsigned a[2][4];  // of channels 0 and 1, 2 and 3 of a word
                #pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const unsigned* const at = values + (16 * k + 8 * half + 2 * quarter) * PITCH + 8 * channels + of;
                    const unsigned first = at[0] ^ FLIP, second = at[PITCH] ^ FLIP;
                    const unsigned low_bytes = __byte_perm(first, second, 0x5140);
                    const unsigned high_bytes = __byte_perm(first, second, 0x7362);
                    a[0][2 * half] = widen<LOW>(low_bytes), a[0][2 * half + 1] = widen<HIGH>(low_bytes);
                    a[1][2 * half] = widen<LOW>(high_bytes), a[1][2 * half + 1] = widen<HIGH>(high_bytes);
                }
                #pragma unroll
                for (int n = 0; n < WARP_ROWS / 8; ++n) {
                    const unsigned b0 = row[8 * n * POOLED_PITCH + 8 * k], b1 = row[8 * n * POOLED_PITCH + 8 * k + 4];
                    mma(sum[0][n], a[0], b0, b1);
                    mma(sum[1][n], a[1], b0, b1);
                }
            }
        }
    }
    const int channel = 32 * channels + 4 * of;
    if (row_group >= ROW_GROUPS || channel >= D) return;
    float* const to = partial + (blockIdx.x * all_rows + chunk * ROWS) * D + channel;
    #pragma unroll
    for (int n = 0; n < WARP_ROWS / 8; ++n)
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int row = row_group * WARP_ROWS + 8 * n + 2 * quarter + c;
            *reinterpret_cast<float4*>(to + row * D) =
                make_float4(sum[0][n][c], sum[0][n][2 + c], sum[1][n][c], sum[1][n][2 + c]);
        }
}
