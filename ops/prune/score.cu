// AnDPro's scores of the evictable positions [low, high), summed over the rows of a chunk.
//
//   scores[chunk, g, t] = sum over rows of A'[row, t] <Y[row], v[t]>,    A'[row, t] = pool(2^(l[t] - peak))[t] / sum
//
// And, if asked for, what the last query of each head attends to: last[h, t] = A[h, W - 1, t], or A' with `pool_last`.
//
// Weights are computed as in prune_anchor; products with anchors as those with queries, in the same lanes.
//
// Defines: those of pool.cuh. Grid: x splits, y KV heads, z chunks. Shared memory: rows, anchors, tiles of keys and of
// values, the keys' weights.

#include "pool.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, D > 128 || REACH > 8 ? 1 : 2)
    prune_score(REQUEST_PARAMETERS, int low, int high, const unsigned* __restrict__ anchors,
                const float4* __restrict__ facts, float* __restrict__ scores, float* __restrict__ last,
                int pool_last) {
    extern __shared__ __align__(16) unsigned shared[];
    __shared__ Rows rows;
    __shared__ float key_scales[TOKENS], value_scales[TOKENS], peaks[ROWS], inverses[ROWS], anchor_factors[ROWS];
    __shared__ int last_heads[ROWS];  // the query head whose last query a row is, or -1
    __shared__ float sums[4][TOKENS];
    unsigned* const vectors = shared;
    unsigned* const anchor_rows = vectors + ROWS * ROW_PITCH;
    unsigned* const keys = anchor_rows + ROWS * ROW_PITCH;
    unsigned* const values = keys + TOKENS * PITCH;
    unsigned* const weights = values + TOKENS * PITCH;
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const Request r = REQUEST;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    load_rows(vectors, rows, r);
    const long long chunk = static_cast<long long>(blockIdx.y) * gridDim.z + blockIdx.z;
    for (int i = threadIdx.x; i < ROWS * (D / 2); i += THREADS)
        anchor_rows[i / (D / 2) * ROW_PITCH + i % (D / 2)] = anchors[chunk * ROWS * (D / 2) + i];
    for (int row = threadIdx.x; row < ROWS; row += THREADS) {
        const float4 of_row = facts[chunk * ROWS + row];
        const int2 place = r.place(row);
        peaks[row] = of_row.x, inverses[row] = of_row.y, anchor_factors[row] = of_row.z;
        const bool is_last = last != nullptr && place.x >= 0 && place.y == window - 1;
        last_heads[row] = is_last ? static_cast<int>(blockIdx.y) * ratio + place.x : -1;
    }
    const int tiles = (high - low + INNER - 1) / INNER;
    const int end = split_begin(blockIdx.x + 1, tiles);
    for (int tile = split_begin(blockIdx.x, tiles); tile < end; ++tile) {
        const int inner = low + tile * INNER, begin = inner - REACH, until = min(inner + INNER, high);
        __syncthreads();
        load_tile(keys, key_scales, r, KEYS, begin, 0, length);
        load_tile(values, value_scales, r, VALUES, begin, inner, until);
        copies_arrive();
        __syncthreads();
        float out[2][NT][4];
        multiply(out, keys, vectors);
        write_weights(weights, out, key_scales, rows, peaks, begin);
        if (last != nullptr && !pool_last)
            for_each_pair(out, [&](int, int token, int row, float first, float second) {
                const int position = begin + token;
                if (position < inner || position >= until) return;
                const float product[2] = {first, second};
                #pragma unroll
                for (int c = 0; c < 2; ++c)
                    if (last_heads[row + c] >= 0)
                        last[static_cast<long long>(last_heads[row + c]) * length + position] =
                            weight(product[c], key_scales[token], rows.factor[row + c], peaks[row + c], 0.0f, position,
                                   rows.sees[row + c]) * inverses[row + c];
            });
        __syncthreads();
        unsigned x[RUN + 2 * REACH];
        pool(x, weights);
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < RUN; ++i) weights[(pool_token() + i) * WEIGHT_PITCH + pool_pair()] = x[i];
        multiply(out, values, anchor_rows);
        __syncthreads();
        float of_token[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // lane / 4 of the warp's tokens, and 8, 16, 24 more
        for_each_pair(out, [&](int i, int token, int row, float first, float second) {
            const float2 pooled = numeric::Fp16::unpack(weights[token * WEIGHT_PITCH + row / 2]);
            of_token[i] += pooled.x * (first * anchor_factors[row]);
            of_token[i] += pooled.y * (second * anchor_factors[row + 1]);
            const int position = begin + token;
            if (!pool_last || position < inner || position >= until) return;
            #pragma unroll
            for (int c = 0; c < 2; ++c)
                if (last_heads[row + c] >= 0)
                    last[static_cast<long long>(last_heads[row + c]) * length + position] =
                        (c ? pooled.y : pooled.x) * (DOWN * inverses[row + c]);
        });
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            of_token[i] += __shfl_xor_sync(~0u, of_token[i], 1);
            of_token[i] += __shfl_xor_sync(~0u, of_token[i], 2);
            if ((lane & 3) == 0) sums[warp >> 1][first_token() + 8 * i + (lane >> 2)] = of_token[i];
        }
        __syncthreads();
        const int position = begin + static_cast<int>(threadIdx.x);
        if (threadIdx.x < TOKENS && position >= inner && position < until) {
            const int t = threadIdx.x;
            const float sum = (sums[0][t] + sums[1][t]) + (sums[2][t] + sums[3][t]);
            scores[(static_cast<long long>(blockIdx.z) * gridDim.y + blockIdx.y) * length + position] =
                sum * value_scales[t];
        }
    }
}
