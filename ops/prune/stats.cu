// Largest logit to base 2 and sum of exp2(logit - largest) of every observation row, over a split of the positions.
//
//   stats[split, g, chunk, row] = (max_t l[t], sum_t 2^(l[t] - max)),    l[t] = log2(e) scale q . k[t] for t that the row sees
//
// Defines: those of observe.cuh. Grid: x splits, y KV heads, z chunks. Shared memory: rows, a tile of keys.

#include "observe.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    prune_stats(REQUEST_PARAMETERS, float2* __restrict__ stats) {
    extern __shared__ __align__(16) unsigned shared[];
    __shared__ Rows rows;
    __shared__ float scales[TOKENS];
    __shared__ float2 of_half[ROWS];
    unsigned* const vectors = shared;
    unsigned* const keys = shared + ROWS * ROW_PITCH;
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const Request r = REQUEST;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    load_rows(vectors, rows, r);
    __syncthreads();
    float most[NT][2], sum[NT][2], factor[NT][2];
    int sees[NT][2];
    #pragma unroll
    for (int n = 0; n < NT; ++n)
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int row = first_row() + 8 * n + 2 * (lane & 3) + c;
            most[n][c] = LOWEST, sum[n][c] = 0.0f;
            factor[n][c] = rows.factor[row], sees[n][c] = rows.sees[row];
        }
    const int tiles = (length + TOKENS - 1) / TOKENS;
    const int begin = split_begin(blockIdx.x, tiles), end = split_begin(blockIdx.x + 1, tiles);
    for (int tile = begin; tile < end; ++tile) {
        __syncthreads();
        load_tile(keys, scales, r, KEYS, tile * TOKENS, 0, length);
        copies_arrive();
        __syncthreads();
        float out[2][NT][4];
        multiply(out, keys, vectors);
        const int token = first_token() + (lane >> 2);
        #pragma unroll
        for (int n = 0; n < NT; ++n)
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                float x[4], greatest = most[n][c];
                #pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int of = token + 8 * i;
                    x[i] = logit(out[i >> 1][n][2 * (i & 1) + c], scales[of], factor[n][c]);
                    if (tile * TOKENS + of > sees[n][c]) x[i] = __int_as_float(0xff800000);
                    greatest = fmaxf(greatest, x[i]);
                }
                sum[n][c] *= exp2_fast(most[n][c] - greatest);
                most[n][c] = greatest;
                #pragma unroll
                for (int i = 0; i < 4; ++i) sum[n][c] += exp2_fast(x[i] - greatest);
            }
    }
    // Over the lanes that have the same rows, then over the two warps that do.
    #pragma unroll
    for (int n = 0; n < NT; ++n)
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            #pragma unroll
            for (int apart = 4; apart < 32; apart *= 2) {
                const float theirs = __shfl_xor_sync(~0u, most[n][c], apart);
                const float more = __shfl_xor_sync(~0u, sum[n][c], apart);
                const float greater = fmaxf(most[n][c], theirs);
                sum[n][c] = sum[n][c] * exp2_fast(most[n][c] - greater) + more * exp2_fast(theirs - greater);
                most[n][c] = greater;
            }
            if ((lane >> 2) == 0 && (warp & 1) == 0)
                of_half[first_row() + 8 * n + 2 * lane + c] = make_float2(most[n][c], sum[n][c]);
        }
    __syncthreads();
    if ((lane >> 2) == 0 && (warp & 1) == 1)
        #pragma unroll
        for (int n = 0; n < NT; ++n)
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int row = first_row() + 8 * n + 2 * lane + c;
                const float2 theirs = of_half[row];
                const float greater = fmaxf(most[n][c], theirs.x);
                const float both = theirs.y * exp2_fast(theirs.x - greater) + sum[n][c] * exp2_fast(most[n][c] - greater);
                const long long at = (static_cast<long long>(blockIdx.x) * gridDim.y + blockIdx.y) * gridDim.z + blockIdx.z;
                stats[at * ROWS + row] = make_float2(greater, both);
            }
}
