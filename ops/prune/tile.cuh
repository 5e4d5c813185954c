// Tiles of 64 tokens against the observation rows of a chunk, by blocks of ROWS / 16 warps that have 16 rows each.
//
// Rows are the rows of products, tokens their columns: of a tile, lane l has tokens 16 (l % 4) to 16 (l % 4) + 15, so
// that pooling along them asks its neighbours for REACH tokens and no more, of rows 16 w + l / 4 and 8 more. A tile's
// int8 vectors arrive while the one before is computed, and are widened to fp16 once for all warps.
//
// Of a tile's tokens the first and the last REACH have neighbours that the tile does not hold: their pooled weights are
// not those of the row.
//
// Defines needed: those of observe.cuh; REACH: kernel / 2, neighbours to either side.

#pragma once

#define WARPS_OF_BLOCK (ROWS / 16)
#include "observe.cuh"

constexpr int HALF_PITCH = D / 2 + 4;  // words from one fp16 vector to the next
// Words more from each 16 tokens to the next: the 8 rows of a matrix, 2 of each 16 tokens, lie in different banks.
constexpr int APART = 8;
constexpr int HALF_WORDS = TOKENS * HALF_PITCH + 4 * APART, RAW_WORDS = TOKENS * (D / 4);
// Keys and values share one place, in turn, where there is no room for both.
constexpr bool ONE_PLACE = D > 128;
constexpr int TILE_WORDS = (ONE_PLACE ? 1 : 2) * HALF_WORDS + 2 * RAW_WORDS;
constexpr int INNER = TOKENS - 2 * REACH;
constexpr int PAIRS = 8;                  // of tokens, that a lane has
constexpr int BEYOND = (REACH + 1) / 2;   // pairs that pooling asks each neighbour for
constexpr int SPAN = PAIRS + 2 * BEYOND;
static_assert(REACH <= 2 * PAIRS && THREADS >= TOKENS && TOKENS * (D / 8) % THREADS == 0, "");

__device__ __forceinline__ int place_of(int token) { return token * HALF_PITCH + token / 16 * APART; }

// Keys and values on their way, and as fp16. `scales` are those of the keys, then those of the values.
struct Tile {
    unsigned *keys, *values, *raw_keys, *raw_values;
    float* raw_scales;

    __device__ __forceinline__ Tile(unsigned* from, float* scales) : raw_scales(scales) {
        keys = from, values = ONE_PLACE ? keys : keys + HALF_WORDS;
        raw_keys = values + HALF_WORDS, raw_values = raw_keys + RAW_WORDS;
    }
    // Of positions `begin` and on; zeros for keys that are not in [0, length) and for values that are not in [low, high).
    __device__ __forceinline__ void fetch(const Request& r, int begin, int low, int high) const {
        constexpr int EACH = TOKENS / WARPS;
        const int lane = thread_now() & 31, warp = thread_now() >> 5;
        // Each lane finds one of the warp's vectors.
        const int mine = warp * EACH + lane % EACH, position = begin + mine;
        const bool key = position >= 0 && position < r.length, value = key && position >= low && position < high;
        const signed char* const found = key ? r.vector(position, KEYS) : r.cache;
        const long long to_value = static_cast<long long>(r.block_size) * gridDim.y * (D + 4);
        const unsigned keys_there = __ballot_sync(~0u, key), values_there = __ballot_sync(~0u, value);
        if (lane < EACH) {
            copy_word(raw_scales + mine, found + (key ? D : 0), key);
            copy_word(raw_scales + TOKENS + mine, found + (value ? to_value + D : 0), value);
        }
        #pragma unroll 2
        for (int i = 0; i < EACH; ++i) {
            const signed char* const from =
                reinterpret_cast<const signed char*>(__shfl_sync(~0u, reinterpret_cast<long long>(found), i));
            const bool with_key = keys_there >> i & 1u, with_value = values_there >> i & 1u;
            const int at = (warp * EACH + i) * (D / 4);
            for (int word = lane; word < D / 4; word += 32) {
                copy_word(raw_keys + at + word, from + (with_key ? 4 * word : 0), with_key);
                copy_word(raw_values + at + word, from + (with_value ? to_value + 4 * word : 0), with_value);
            }
        }
    }
    static __device__ __forceinline__ void widen_all(unsigned* to, const unsigned* raw) {
        const int thread = thread_now();
        #pragma unroll
        for (int i = 0; i < TOKENS * (D / 8) / THREADS; ++i) {
            const int item = i * THREADS + thread, token = item / (D / 8), part = item % (D / 8);
            uint2 bytes = *reinterpret_cast<const uint2*>(raw + 2 * item);
            bytes.x ^= FLIP, bytes.y ^= FLIP;
            *reinterpret_cast<uint4*>(to + place_of(token) + 4 * part) =
                make_uint4(widen<LOW>(bytes.x), widen<HIGH>(bytes.x), widen<LOW>(bytes.y), widen<HIGH>(bytes.y));
        }
    }
};

// Where the matrices of this warp's 16 rows begin, fp16 [ROWS, HALF_PITCH words]: `load_matrices` 8 k words on gives the
// fragment of channels 16 k and on.
__device__ __forceinline__ const unsigned* fragments(const unsigned* rows) {
    const int lane = thread_now() & 31, row = 16 * (thread_now() >> 5) + lane % 16;
    return rows + row * HALF_PITCH + lane / 16 * 4;
}

// Where the rows that a lane names begin, for four matrices of the first two tokens (0, 1, 16, 17, ... 49), and of the next
// two (2, 3, 18, ...): channels 0 to 7 of both, then 8 to 15.
__device__ __forceinline__ int matrix_row() {
    const int lane = thread_now() & 31, matrix = lane / 8, row = lane % 8;
    return place_of(row / 2 * 16 + matrix % 2 * 2 + row % 2) + matrix / 2 * 4;
}

// out[j] = this warp's rows times tokens 16 (l % 4) + 2 j and one more; `fragment(a, k)` gives the rows' 16 channels.
template <int UNROLL, class Fragment>
__device__ __forceinline__ void multiply_rows(float (&out)[PAIRS][4], const unsigned* tokens, Fragment fragment) {
    const unsigned* const from = tokens + matrix_row();
    #pragma unroll
    for (int j = 0; j < PAIRS; ++j)
        #pragma unroll
        for (int c = 0; c < 4; ++c) out[j][c] = 0.0f;
    #pragma unroll UNROLL
    for (int k = 0; k < KSTEPS; ++k) {
        unsigned a[4];
        fragment(a, k);
        #pragma unroll
        for (int j = 0; j < PAIRS; j += 2) {
            unsigned b[4];
            load_matrices(b, from + 2 * j * HALF_PITCH + 8 * k);
            mma(out[j], a, b[0], b[2]);
            mma(out[j + 1], a, b[1], b[3]);
        }
    }
}

// Products with keys of positions `begin` and on, times the keys' scales; -inf where a row does not see the position.
__device__ __forceinline__ void scale_and_mask(float (&out)[PAIRS][4], const float* key_scales, const Request& r, int begin,
                                               const Rows& rows) {
    const int first = 16 * (thread_now() & 3);
    #pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
        const float2 scale = *reinterpret_cast<const float2*>(key_scales + first + 2 * j);
        out[j][0] *= scale.x, out[j][1] *= scale.y, out[j][2] *= scale.x, out[j][3] *= scale.y;
    }
    if (begin >= 0 && begin + TOKENS <= r.length - r.window) return;  // every row sees all of it
    const int row = 16 * (threadIdx.x >> 5) + (threadIdx.x & 31) / 4;
    const int last[2] = {rows.sees[row] - begin - first, rows.sees[row + 8] - begin - first};
    #pragma unroll
    for (int j = 0; j < PAIRS; ++j)
        #pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int token = 2 * j + c % 2;
            const bool seen = token <= last[c / 2] && token >= -begin - first;
            out[j][c] = seen ? out[j][c] : __int_as_float(0xff800000);
        }
}

// Tokens BY further on than those of x[p].
template <int BY> __device__ __forceinline__ unsigned further(const unsigned (&x)[SPAN], int p) {
    if constexpr (BY % 2 == 0) return x[p + BY / 2 < SPAN ? p + BY / 2 : SPAN - 1];
    return __byte_perm(x[p + BY / 2 < SPAN ? p + BY / 2 : SPAN - 1], x[p + BY / 2 + 1 < SPAN ? p + BY / 2 + 1 : SPAN - 1],
                       0x5432);
}

// From maxima of COVERED tokens from each one on, in steps of as many, to those of the kernel.
template <int COVERED> __device__ __forceinline__ void widen_maxima(unsigned (&x)[SPAN]) {
    constexpr int KERNEL = 2 * REACH + 1, STEP = COVERED < KERNEL - COVERED ? COVERED : KERNEL - COVERED;
    if constexpr (STEP > 0) {
        #pragma unroll
        for (int p = 0; p + STEP / 2 < SPAN; ++p) x[p] = max_f16x2(x[p], further<STEP>(x, p));
        widen_maxima<COVERED + STEP>(x);
    }
}

// Weights of one row, fp16 of two tokens each, to their maxima over REACH tokens to either side.
__device__ __forceinline__ void pool(unsigned (&weights)[PAIRS]) {
    const int lane = thread_now() & 31, quarter = lane & 3;
    unsigned x[SPAN];
    #pragma unroll
    for (int i = 0; i < PAIRS; ++i) x[BEYOND + i] = weights[i];
    #pragma unroll
    for (int i = 0; i < BEYOND; ++i) {
        const unsigned before = __shfl_sync(~0u, weights[PAIRS - BEYOND + i], lane - 1);
        const unsigned behind = __shfl_sync(~0u, weights[i], lane + 1);
        x[i] = quarter == 0 ? 0u : before;
        x[BEYOND + PAIRS + i] = quarter == 3 ? 0u : behind;
    }
    widen_maxima<1>(x);
    #pragma unroll
    for (int i = 0; i < PAIRS; ++i) weights[i] = further<2 * BEYOND - REACH>(x, i);
}
