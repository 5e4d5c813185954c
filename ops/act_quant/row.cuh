// A row of activations: how threads share it, read and write it, reduce over it, and round it to int8.
//
// Defines: DTYPE, VECTORS, ALIGNED; see act_quant.cu.

#pragma once

#include "numeric.cuh"

#if DTYPE == 0
using T = numeric::Bf16;
#else
using T = numeric::Fp16;
#endif

// 1024 threads leave each 64 registers, which 4 vectors still fit in.
constexpr int MAX_THREADS = VECTORS == 1 || VECTORS == 2 ? 512 : 1024;
constexpr float AMAX_FLOOR = 1e-18f;
constexpr unsigned ALL = 0xffffffffu;

// 8 elements that one thread handles together; a tensor's element e of them is at [first + e * step].
struct Place {
    int first, step;
};

__device__ __forceinline__ Place place(int vector) {
    if constexpr (ALIGNED != 0) {
        return {(vector * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * 8, 1};
    } else {
        const int threads = static_cast<int>(blockDim.x);
        return {vector * 8 * threads + static_cast<int>(threadIdx.x), threads};
    }
}

struct Eight {
    unsigned word[4];
};

__device__ __forceinline__ Eight zeros() { return {{0, 0, 0, 0}}; }

// Elements past the end of the row (K) read as 0.
__device__ __forceinline__ Eight load(const unsigned short* row, Place at, int K) {
    Eight x = zeros();
    if constexpr (ALIGNED != 0) {
        if (at.first < K) {
            const uint4 v = *reinterpret_cast<const uint4*>(row + at.first);
            x = {{v.x, v.y, v.z, v.w}};
        }
    } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const int k = at.first + e * at.step;
            if (k < K) x.word[e / 2] |= static_cast<unsigned>(row[k]) << (e % 2 * 16);
        }
    }
    return x;
}

__device__ __forceinline__ void store(unsigned short* row, Place at, int K, const Eight& x) {
    if constexpr (ALIGNED != 0) {
        if (at.first < K)
            *reinterpret_cast<uint4*>(row + at.first) = make_uint4(x.word[0], x.word[1], x.word[2], x.word[3]);
    } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const int k = at.first + e * at.step;
            if (k < K) row[k] = static_cast<unsigned short>(x.word[e / 2] >> (e % 2 * 16));
        }
    }
}

__device__ __forceinline__ void store_bytes(signed char* row, Place at, int K, unsigned low, unsigned high) {
    if constexpr (ALIGNED != 0) {
        if (at.first < K) *reinterpret_cast<uint2*>(row + at.first) = make_uint2(low, high);
    } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const int k = at.first + e * at.step;
            if (k < K) row[k] = static_cast<signed char>((e < 4 ? low : high) >> (e % 4 * 8));
        }
    }
}

// Each of the two reductions has its own shared memory, so neither waits for the readers of the other.
__device__ __forceinline__ float block_sum(float value) {
    __shared__ float partial[MAX_THREADS / 32];
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(ALL, value, offset);
    if (lane == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    value = lane < warps ? partial[lane] : 0.0f;
#pragma unroll
    for (int offset = MAX_THREADS / 64; offset > 0; offset /= 2) value += __shfl_xor_sync(ALL, value, offset);
    return __shfl_sync(ALL, value, 0);
}

__device__ __forceinline__ unsigned block_max(unsigned value) {
    __shared__ unsigned partial[MAX_THREADS / 32];
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    value = __reduce_max_sync(ALL, value);
    if (lane == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    return __reduce_max_sync(ALL, lane < warps ? partial[lane] : 0u);
}

struct AbsMax {
    unsigned word = 0;

    __device__ __forceinline__ void take(const Eight& y) {
#pragma unroll
        for (int i = 0; i < 4; ++i) word = T::abs_max(word, y.word[i]);
    }
    // Bits of the fp32 maximum over the block: as integers they order like the magnitudes, infinity and then NaN last.
    __device__ __forceinline__ unsigned of_block() const {
        const float2 v = T::unpack(word);
        const unsigned a = __float_as_uint(v.x), b = __float_as_uint(v.y);
        return block_max(max(a & 0x7fffffffu, b & 0x7fffffffu));
    }
};

struct Quantiser {
    float inverse;
    unsigned mask;  // 0 for a row that is not finite: its bytes are 0

    __device__ __forceinline__ Quantiser(unsigned amax_bits, float* scale) {
        const bool finite = amax_bits < 0x7f800000u;
        const float amax = finite ? fmaxf(__uint_as_float(amax_bits), AMAX_FLOOR) : __uint_as_float(amax_bits);
        inverse = __fdiv_rn(127.0f, amax);
        mask = finite ? ALL : 0u;
        if (threadIdx.x == 0) *scale = __fdiv_rn(amax, 127.0f);
    }
    // Adding 1.5 * 2^23 rounds to an integer, half to even, and leaves it in the low bits. Product and sum round
    // separately, as they do on a CPU.
    __device__ __forceinline__ unsigned round(float v) const {
        return __float_as_uint(__fadd_rn(__fmul_rn(v, inverse), 12582912.0f));
    }
    __device__ __forceinline__ unsigned four(unsigned low, unsigned high) const {
        const float2 a = T::unpack(low), b = T::unpack(high);
        const unsigned first = __byte_perm(round(a.x), round(a.y), 0x0040);
        const unsigned second = __byte_perm(round(b.x), round(b.y), 0x0040);
        return __byte_perm(first, second, 0x5410) & mask;
    }
    __device__ __forceinline__ void write(signed char* row, Place at, int K, const Eight& y) const {
        store_bytes(row, at, K, four(y.word[0], y.word[1]), four(y.word[2], y.word[3]));
    }
};
