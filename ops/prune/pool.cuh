// Weights of a tile in shared memory, fp16 [TOKENS, WEIGHT_PITCH words] of two rows each, pooled along the tokens.
//
// Each thread takes a pair of rows and RUN tokens. Of a tile's tokens the first and the last REACH have neighbours that
// the tile does not hold: their result is not that of the row.
//
// Defines needed: those of observe.cuh; REACH: kernel / 2, neighbours to either side.

#pragma once

#include "observe.cuh"

constexpr int WEIGHT_PITCH = ROWS / 2 + 4;
constexpr int RUN = ROWS / 8;
constexpr int INNER = TOKENS - 2 * REACH;
static_assert(TOKENS / RUN * (ROWS / 2) == THREADS, "");
static_assert(INNER > 0, "");

__device__ __forceinline__ int pool_pair() { return threadIdx.x % (ROWS / 2); }
__device__ __forceinline__ int pool_token() { return threadIdx.x / (ROWS / 2) * RUN; }

// From maxima of COVERED neighbours, in steps of as many, to those of the kernel.
template <int COVERED> __device__ __forceinline__ void widen_maxima(unsigned (&x)[RUN + 2 * REACH]) {
    constexpr int KERNEL = 2 * REACH + 1, STEP = COVERED < KERNEL - COVERED ? COVERED : KERNEL - COVERED;
    if constexpr (STEP > 0) {
        #pragma unroll
        for (int i = 0; i + STEP < RUN + 2 * REACH; ++i) x[i] = max_f16x2(x[i], x[i + STEP]);
        widen_maxima<COVERED + STEP>(x);
    }
}

// pooled[i] = maximum over token + i - REACH to token + i + REACH, for the first RUN.
__device__ __forceinline__ void pool(unsigned (&pooled)[RUN + 2 * REACH], const unsigned* weights) {
    #pragma unroll
    for (int i = 0; i < RUN + 2 * REACH; ++i) {
        const int token = pool_token() + i - REACH;
        pooled[i] = token >= 0 && token < TOKENS ? weights[token * WEIGHT_PITCH + pool_pair()] : 0u;
    }
    widen_maxima<1>(pooled);
}

// Weights times 2^UP of a tile of keys whose first token lies at `begin`, into shared memory as `pool` reads them.
__device__ __forceinline__ void write_weights(unsigned* weights, float (&out)[2][NT][4], const float* scales,
                                              const Rows& rows, const float* peaks, int begin) {
    for_each_pair(out, [&](int, int token, int row, float first, float second) {
        weights[token * WEIGHT_PITCH + row / 2] =
            pack_f16(weight(first, scales[token], rows.factor[row], peaks[row], UP, begin + token, rows.sees[row]),
                     weight(second, scales[token], rows.factor[row + 1], peaks[row + 1], UP, begin + token,
                            rows.sees[row + 1]));
    });
}
