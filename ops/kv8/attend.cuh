// One tile of 16 tokens against up to 8 query heads of one KV head, by a warp, on tensor cores.
//
// Products are in fp16, where int8 is exact: S^T = K Q^T with tokens as rows and query heads as columns, then
// O^T = V^T P^T with channels as rows. The scales of keys multiply the scores; those of values multiply the
// probabilities, and the running maximum M is that of s + log2 sv, so that what is rounded to fp16 lies in [0, 1]
// however small or large the scales are. The sum of probabilities, in fp32, is relative to the same M.
//
// Defines needed: D, DTYPE; TOKEN_BYTES: from a token's vector to the next token's in shared memory.

#pragma once

#include "line.cuh"
#include "numeric.cuh"

#if DTYPE == 0
using T = numeric::Bf16;
#else
using T = numeric::Fp16;
#endif

constexpr int KSTEPS = D / 16, VSTEPS = (D + 31) / 32;
static_assert(D % 16 == 0, "");

__device__ __forceinline__ unsigned transpose(unsigned x) {
    unsigned y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ unsigned load_word(unsigned address) {
    unsigned word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
    return word;
}

__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Greatest, or sum, over the lanes that hold the same query heads: those of the same place in a group of 4.
__device__ __forceinline__ float max_over_tokens(float x) {
    #pragma unroll
    for (int apart = 4; apart < 32; apart *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, apart));
    return x;
}
__device__ __forceinline__ float sum_over_tokens(float x) {
    #pragma unroll
    for (int apart = 4; apart < 32; apart *= 2) x += __shfl_xor_sync(~0u, x, apart);
    return x;
}

// What a warp has of up to 8 query heads: lane l holds heads 2 (l % 4) and one more, and of channels those of its words.
struct State {
    float out[2 * VSTEPS][4], most[2], sum[2];

    __device__ __forceinline__ void clear() {
        #pragma unroll
        for (int i = 0; i < 2 * VSTEPS; ++i)
            #pragma unroll
            for (int c = 0; c < 4; ++c) out[i][c] = 0.0f;
        most[0] = most[1] = LOWEST, sum[0] = sum[1] = 0.0f;
    }
    __device__ __forceinline__ void rescale(const float (&greater)[2]) {
        const float factor[2] = {exp2_fast(most[0] - greater[0]), exp2_fast(most[1] - greater[1])};
        #pragma unroll
        for (int i = 0; i < 2 * VSTEPS; ++i)
            #pragma unroll
            for (int c = 0; c < 4; ++c) out[i][c] *= factor[c & 1];
        #pragma unroll
        for (int i = 0; i < 2; ++i) sum[i] *= factor[i], most[i] = greater[i];
    }
};

// One tile: `keys`, `values` are shared addresses of this head's vector of the tile's first token; `left` tokens count.
__device__ __forceinline__ void attend(State& state, const unsigned (&query)[KSTEPS][2], unsigned keys, unsigned values,
                                       int left, const float (&scale_log2)[2]) {
    const int lane = threadIdx.x & 31, token = lane >> 2, quarter = lane & 3;
    float score[4] = {};
    const unsigned key0 = keys + token * TOKEN_BYTES, key1 = key0 + 8 * TOKEN_BYTES;
    #pragma unroll
    for (int i = 0; i < KSTEPS; ++i) {
        const unsigned low = load_word(key0 + 16 * i + 4 * quarter) ^ FLIP;
        const unsigned high = load_word(key1 + 16 * i + 4 * quarter) ^ FLIP;
        const unsigned a[4] = {widen<LOW>(low), widen<LOW>(high), widen<HIGH>(low), widen<HIGH>(high)};
        mma(score, a, query[i][0], query[i][1]);
    }
    float most[2] = {state.most[0], state.most[1]}, value_scale[2];
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int t = token + 8 * half;
        const bool there = t < left;
        const float key_scale = __uint_as_float(load_word(keys + t * TOKEN_BYTES + D));
        value_scale[half] = __uint_as_float(load_word(values + t * TOKEN_BYTES + D));
        const float level = log2_fast(value_scale[half]);
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            float& s = score[2 * half + i];
            s = there ? s * (key_scale * scale_log2[i]) : __int_as_float(0xff800000);
            most[i] = fmaxf(most[i], there ? s + level : s);
        }
        value_scale[half] = there ? value_scale[half] : 0.0f;
    }
    most[0] = max_over_tokens(most[0]), most[1] = max_over_tokens(most[1]);
    if (__any_sync(~0u, most[0] > state.most[0] || most[1] > state.most[1])) state.rescale(most);
    unsigned probability[2];
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float p0 = exp2_fast(score[2 * half] - most[0]), p1 = exp2_fast(score[2 * half + 1] - most[1]);
        state.sum[0] += p0, state.sum[1] += p1;
        probability[half] = transpose(pack_f16(p0 * value_scale[half], p1 * value_scale[half]));
    }
    const unsigned value0 = values + 2 * quarter * TOKEN_BYTES + 4 * token;
    #pragma unroll
    for (int j = 0; j < VSTEPS; ++j) {
        unsigned a[2][4];  // of channels 0 and 1, 2 and 3 of a word
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned at = value0 + 8 * half * TOKEN_BYTES + 32 * j;
            const unsigned first = load_word(at) ^ FLIP, second = load_word(at + TOKEN_BYTES) ^ FLIP;
            const unsigned low = __byte_perm(first, second, 0x5140), high = __byte_perm(first, second, 0x7362);
            a[0][2 * half] = widen<LOW>(low), a[0][2 * half + 1] = widen<HIGH>(low);
            a[1][2 * half] = widen<LOW>(high), a[1][2 * half + 1] = widen<HIGH>(high);
        }
        mma(state.out[2 * j], a[0], probability[0], probability[1]);
        mma(state.out[2 * j + 1], a[1], probability[0], probability[1]);
    }
}

// Query heads of one KV head as columns of a product: 4 neighbouring channels a lane and step. They are brought to
// fp16's range by a power of two for each head, which goes into `scale_log2`.
__device__ __forceinline__ void load_query(unsigned (&query)[KSTEPS][2], float (&scale_log2)[2],
                                           const unsigned short* q, int heads, float scale) {
    const int lane = threadIdx.x & 31, head = lane >> 2, quarter = lane & 3;
    uint2 raw[KSTEPS];
    float greatest = 0.0f;
    #pragma unroll
    for (int i = 0; i < KSTEPS; ++i) {
        raw[i] = make_uint2(0, 0);
        if (head < heads) raw[i] = *reinterpret_cast<const uint2*>(q + head * D + 16 * i + 4 * quarter);
        const float2 a = T::unpack(raw[i].x), b = T::unpack(raw[i].y);
        greatest = fmaxf(greatest, fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(b.x), fabsf(b.y))));
    }
    greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, 1));
    greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, 2));
    // 2^-e where 2^e <= greatest < 2^(e + 1), from the exponent's bits; 1 for zeros and what is not finite.
    const unsigned bits = __float_as_uint(greatest) & 0x7f800000u;
    const bool usable = bits > 0x08000000u && bits < 0x76000000u;
    const float down = usable ? __uint_as_float(0x7f000000u - bits) : 1.0f;
    #pragma unroll
    for (int i = 0; i < KSTEPS; ++i) {
        const float2 a = T::unpack(raw[i].x), b = T::unpack(raw[i].y);
        query[i][0] = pack_f16(a.x * down, a.y * down), query[i][1] = pack_f16(b.x * down, b.y * down);
    }
    const float up = scale * 1.4426950408889634f / down;
    #pragma unroll
    for (int i = 0; i < 2; ++i) scale_log2[i] = __shfl_sync(~0u, up, (2 * quarter + i) * 4);
}
