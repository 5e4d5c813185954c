// The observation queries of a request against tiles of its tokens, in blocks of 256 threads or WARPS_OF_BLOCK
// warps.
//
// A block has one KV head (blockIdx.y of gridDim.y) and one chunk of the rows that attend to it (blockIdx.z): a row is a
// query of one of the KV head's r query heads. A chunk is `heads_per_chunk` whole heads, or, where a window is larger
// than ROWS, one of `parts` of a head. Rows that there are not see nothing and weigh 0.
//
// Tokens are the rows of products, observation rows their columns: warp w has tokens 32 (w % 2) and on of a tile of 64,
// and rows w / 2 * ROWS / 4 and on. Lane l has of each 16 tokens l / 4 and 8 more, of each 8 rows 2 (l % 4) and one more.
//
// Defines needed: D head size, DTYPE of query (0 bf16, 1 fp16), ROWS of a chunk: 32, 64 or 128.

#pragma once

#include "numeric.cuh"
#include "tensor.cuh"

#if DTYPE == 0
using T = numeric::Bf16;
#else
using T = numeric::Fp16;
#endif

#ifdef WARPS_OF_BLOCK
constexpr int WARPS = WARPS_OF_BLOCK;
#else
constexpr int WARPS = 8;
#endif
constexpr int THREADS = 32 * WARPS, TOKENS = 64;
constexpr int KSTEPS = D / 16;
constexpr int NT = ROWS / 32;  // products of 8 rows that a warp has
// Words from one vector to the next in shared memory, such that lanes meet in no bank.
constexpr int PITCH = D / 4 % 8 == 4 ? D / 4 : D / 4 + 4;
constexpr int ROW_PITCH = D / 2 % 16 == 8 ? D / 2 : D / 2 + 8;
constexpr int KEYS = 0, VALUES = 1;
static_assert(D % 16 == 0 && ROWS % 32 == 0, "");
// What a maximum of logits starts from. Finite, so that the difference of two of them is a number.
constexpr float LOWEST = -3.0e38f;
// Weights are exp2(logit - peak) times 2^UP, so that fp16 rounds to 2^-11 all that are above 2^-29 of the greatest.
constexpr float UP = 15.0f, DOWN = 1.0f / 32768.0f;

struct Request {
    const unsigned short* query;  // [window, heads, D]
    long long query_pitch, head_pitch;
    const signed char* cache;
    long long page_bytes;
    const int* table;
    int block_size, length;
    float scale;
    int window, ratio, heads_per_chunk, parts;

    __device__ __forceinline__ const signed char* vector(int position, int half) const {
        const int slot = half * block_size + position % block_size;
        return cache + table[position / block_size] * page_bytes +
               (static_cast<long long>(slot) * gridDim.y + blockIdx.y) * (D + 4);
    }
    // The query head, of those of this KV head, and the query that a row of this chunk is; a head of -1 for none.
    __device__ __forceinline__ int2 place(int row) const {
        const int chunk = blockIdx.z;
        if (parts > 1) {
            const int query_of_row = chunk % parts * ROWS + row;
            return make_int2(query_of_row < window ? chunk / parts : -1, query_of_row);
        }
        const int head = chunk * heads_per_chunk + row / window;
        return make_int2(row / window < heads_per_chunk && head < ratio ? head : -1, row % window);
    }
};
// The parameters of a kernel that make up a Request, and their names in its order.
#define REQUEST_PARAMETERS                                                                                        \
    const unsigned short *__restrict__ query, long long query_pitch, long long head_pitch,                        \
        const signed char *__restrict__ cache, long long page_bytes, const int *__restrict__ table, int block_size, \
        int length, float scale, int window, int ratio, int heads_per_chunk, int parts
#define REQUEST                                                                                                    \
    { query, query_pitch, head_pitch, cache, page_bytes, table, block_size, length, scale, window, ratio,          \
      heads_per_chunk, parts }

// Rows of a chunk beside their vectors.
struct Rows {
    float factor[ROWS];  // of products with int8 keys under a scale of 1, to give logits to base 2
    int sees[ROWS];      // last position that a row attends to, -1 for none
};

// This chunk's rows as fp16 vectors in shared memory, each brought to fp16's range by a power of two.
template <int TO_PITCH = ROW_PITCH>
__device__ __forceinline__ void load_rows(unsigned* to, Rows& rows, const Request& r) {
    constexpr int PARTS = (D / 4 + 31) / 32;  // of 4 channels, for a lane
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    #pragma unroll 4
    for (int i_row = 0; i_row < ROWS / WARPS; ++i_row) {
        const int row = i_row * WARPS + warp;
        const int2 place = r.place(row);
        const unsigned short* const from =
            r.query + place.y * r.query_pitch + (static_cast<int>(blockIdx.y) * r.ratio + place.x) * r.head_pitch;
        uint2 raw[PARTS];
        float greatest = 0.0f;
        #pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const int at = i * 32 + lane;
            raw[i] = make_uint2(0, 0);
            if (place.x >= 0 && at < D / 4) raw[i] = *reinterpret_cast<const uint2*>(from + 4 * at);
            const float2 a = T::unpack(raw[i].x), b = T::unpack(raw[i].y);
            greatest = fmaxf(greatest, fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(b.x), fabsf(b.y))));
        }
        #pragma unroll
        for (int apart = 1; apart < 32; apart *= 2) greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, apart));
        const float down = inverse_power_below(greatest);
        #pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const int at = i * 32 + lane;
            const float2 a = T::unpack(raw[i].x), b = T::unpack(raw[i].y);
            if (at < D / 4)
                *reinterpret_cast<uint2*>(to + row * TO_PITCH + 2 * at) =
                    make_uint2(pack_f16(a.x * down, a.y * down), pack_f16(b.x * down, b.y * down));
        }
        if (lane == 0) {
            rows.factor[row] = r.scale * 1.4426950408889634f * inverse_of_power(down);
            rows.sees[row] = place.x >= 0 ? r.length - r.window + place.y : -1;
        }
    }
}

// Keys or values of positions `begin` and on, with their scales; zeros for positions that are not in [low, high).
__device__ __forceinline__ void load_tile(unsigned* to, float* scales, const Request& r, int half, int begin, int low,
                                          int high) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    // Each lane finds one of the warp's eight vectors.
    const int mine = begin + warp + WARPS * (lane & 7);
    const signed char* const found = mine >= low && mine < high ? r.vector(mine, half) : nullptr;
    #pragma unroll 2
    for (int i = 0; i < TOKENS / WARPS; ++i) {
        const signed char* const from =
            reinterpret_cast<const signed char*>(__shfl_sync(~0u, reinterpret_cast<long long>(found), i));
        const int token = warp + WARPS * i;
        for (int word = lane; word <= D / 4; word += 32) {
            void* const at = word < D / 4 ? static_cast<void*>(to + token * PITCH + word) : scales + token;
            copy_word(at, from ? from + 4 * word : r.cache, from != nullptr);
        }
    }
}

// The first of the tokens, or of the rows, that this warp multiplies.
__device__ __forceinline__ int first_token() { return (threadIdx.x >> 5 & 1) * 32; }
__device__ __forceinline__ int first_row() { return (threadIdx.x >> 6) * (ROWS / 4); }

// out = tokens (int8 [TOKENS, PITCH words]) times rows (fp16 [ROWS, ROW_PITCH words]) over the D channels.
__device__ __forceinline__ void multiply(float (&out)[2][NT][4], const unsigned* tokens, const unsigned* rows) {
    const int of = (threadIdx.x & 31) >> 2, quarter = threadIdx.x & 3;
    const unsigned* const token = tokens + (first_token() + of) * PITCH + quarter;
    const unsigned* const row = rows + (first_row() + of) * ROW_PITCH + 2 * quarter;
    #pragma unroll
    for (int m = 0; m < 2; ++m)
        #pragma unroll
        for (int n = 0; n < NT; ++n)
            #pragma unroll
            for (int c = 0; c < 4; ++c) out[m][n][c] = 0.0f;
    #pragma unroll 2
    for (int k = 0; k < KSTEPS; ++k) {
        unsigned a[2][4];
        #pragma unroll
        for (int m = 0; m < 2; ++m) {
            const unsigned low = token[16 * m * PITCH + 4 * k] ^ FLIP;
            const unsigned high = token[(16 * m + 8) * PITCH + 4 * k] ^ FLIP;
            a[m][0] = widen<LOW>(low), a[m][1] = widen<LOW>(high);
            a[m][2] = widen<HIGH>(low), a[m][3] = widen<HIGH>(high);
        }
        #pragma unroll
        for (int n = 0; n < NT; ++n) {
            const uint2 b = *reinterpret_cast<const uint2*>(row + 8 * n * ROW_PITCH + 8 * k);
            mma(out[0][n], a[0], b.x, b.y);
            mma(out[1][n], a[1], b.x, b.y);
        }
    }
}

// What a lane has of a product: `use(i, token, row, first, second)` for each pair of neighbouring rows of each of its four
// tokens, the i-th.
template <class Use> __device__ __forceinline__ void for_each_pair(float (&out)[2][NT][4], Use use) {
    const int token = first_token() + ((threadIdx.x & 31) >> 2), row = first_row() + 2 * (threadIdx.x & 3);
    #pragma unroll
    for (int m = 0; m < 2; ++m)
        #pragma unroll
        for (int half = 0; half < 2; ++half)
            #pragma unroll
            for (int n = 0; n < NT; ++n)
                use(2 * m + half, token + 16 * m + 8 * half, row + 8 * n, out[m][n][2 * half], out[m][n][2 * half + 1]);
}

// The logit to base 2 of a product, rounded alike wherever it is computed.
__device__ __forceinline__ float logit(float product, float key_scale, float factor) {
    return __fmul_rn(product, __fmul_rn(key_scale, factor));
}

// exp2(logit - peak + up) of a token that the row sees, else 0.
__device__ __forceinline__ float weight(float product, float key_scale, float factor, float peak, float up, int position,
                                        int sees) {
    const float x = logit(product, key_scale, factor);
    return position >= 0 && position <= sees ? exp2_fast(x - peak + up) : 0.0f;
}

// Peak and sum of a row from those of the splits (prune_stats), by a warp: stats[split * stride].
__device__ __forceinline__ float2 combined(const float2* __restrict__ stats, int splits, long long stride) {
    float most = LOWEST, sum = 0.0f;
    for (int split = threadIdx.x & 31; split < splits; split += 32) {
        const float2 theirs = stats[split * stride];
        const float greater = fmaxf(most, theirs.x);
        sum = sum * exp2_fast(most - greater) + theirs.y * exp2_fast(theirs.x - greater);
        most = greater;
    }
    #pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) {
        const float theirs = __shfl_down_sync(~0u, most, apart), more = __shfl_down_sync(~0u, sum, apart);
        const float greater = fmaxf(most, theirs);
        sum = sum * exp2_fast(most - greater) + more * exp2_fast(theirs - greater);
        most = greater;
    }
    return make_float2(__shfl_sync(~0u, most, 0), __shfl_sync(~0u, sum, 0));
}

// 1 / sum, and 0 for a row that there is not.
__device__ __forceinline__ float inverse(float sum) { return sum == 0.0f ? 0.0f : __fdiv_rn(1.0f, sum); }

// Which of n tiles split x of gridDim.x has.
__device__ __forceinline__ int split_begin(int split, int n) {
    const int blocks = gridDim.x;
    return n / blocks * split + min(split, n % blocks);
}
