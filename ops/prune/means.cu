// Attention of each query head, summed over its window (or a part of it), for positions [0, high).
//
//   sums[part, h, t] = sum over the part's rows i of A[h, i, t]
//
// Defines: those of observe.cuh. Grid: x splits, y KV heads, z chunks. Shared memory: rows, a tile of keys, its weights.

#include "observe.cuh"

constexpr int WEIGHT_PITCH = ROWS + 1;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prune_means(REQUEST_PARAMETERS, int high, const float2* __restrict__ stats, int stats_splits,
                float* __restrict__ sums) {
    extern __shared__ __align__(16) unsigned shared[];
    __shared__ Rows rows;
    __shared__ float scales[TOKENS], peaks[ROWS], inverses[ROWS];
    unsigned* const vectors = shared;
    unsigned* const keys = vectors + ROWS * ROW_PITCH;
    float* const weights = reinterpret_cast<float*>(keys + TOKENS * PITCH);
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const Request r = REQUEST;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    load_rows(vectors, rows, r);
    const long long chunk = static_cast<long long>(blockIdx.y) * gridDim.z + blockIdx.z;
    const long long all_rows = static_cast<long long>(gridDim.y) * gridDim.z * ROWS;
    for (int row = warp; row < ROWS; row += WARPS) {
        const float2 found = combined(stats + chunk * ROWS + row, stats_splits, all_rows);
        if (lane == 0) peaks[row] = found.x, inverses[row] = inverse(found.y);
    }
    const int heads = parts > 1 ? 1 : min(heads_per_chunk, ratio - static_cast<int>(blockIdx.z) * heads_per_chunk);
    const int of_head = parts > 1 ? min(ROWS, window - static_cast<int>(blockIdx.z) % parts * ROWS) : window;
    const int part = parts > 1 ? blockIdx.z % parts : 0;
    const int tiles = (high + TOKENS - 1) / TOKENS;
    const int end = split_begin(blockIdx.x + 1, tiles);
    for (int tile = split_begin(blockIdx.x, tiles); tile < end; ++tile) {
        __syncthreads();
        load_tile(keys, scales, r, KEYS, tile * TOKENS, 0, high);
        copies_arrive();
        __syncthreads();
        float out[2][NT][4];
        multiply(out, keys, vectors);
        for_each_pair(out, [&](int, int token, int row, float first, float second) {
            const float product[2] = {first, second};
            #pragma unroll
            for (int c = 0; c < 2; ++c)
                weights[token * WEIGHT_PITCH + row + c] =
                    weight(product[c], scales[token], rows.factor[row + c], peaks[row + c], 0.0f, tile * TOKENS + token,
                           rows.sees[row + c]) * inverses[row + c];
        });
        __syncthreads();
        for (int item = threadIdx.x; item < heads * TOKENS; item += THREADS) {
            const int token = item % TOKENS, head = item / TOKENS, position = tile * TOKENS + token;
            if (position >= high) continue;
            float sum = 0.0f;
            for (int i = 0; i < of_head; ++i) sum += weights[token * WEIGHT_PITCH + head * of_head + i];
            const int first_head = parts > 1 ? blockIdx.z / parts : blockIdx.z * heads_per_chunk;
            const long long query_head = static_cast<long long>(blockIdx.y) * ratio + first_head + head;
            sums[(part * static_cast<long long>(gridDim.y) * ratio + query_head) * length + position] = sum;
        }
    }
}
