// What the fused kernels share beside the stream of weights (stream.cuh): the way from sums to outputs.
//
// Defines: NT (tiles of 8 tokens in a block), R (tiles of 16 output channels in a unit; 4 is for wgmma), U (tiles of 64
// input channels in a step), WARPS, STAGES (steps of weights that a warp has in shared memory), SPLIT (blocks of a
// cluster), RESIDENT (blocks that the registers of a multiprocessor must hold), ONE_GROUP (1: a step is a group), OUT (0
// bf16, 1 fp16, 2 fp32, 3 the int32 sums).

#pragma once

#include "numeric.cuh"
#include "stream.cuh"

constexpr int STEP_CHUNKS = STEP_COLUMNS / 16, TOKENS = 8 * NT;
static_assert(WARPS >= 4 && WARPS <= 32, "a thread loads the scale of each of up to 128 tokens");

#if OUT == 0
using Half = numeric::Bf16;
#else
using Half = numeric::Fp16;
#endif

// Where the sum of a row and a token is: tokens change places within a row so that two lanes meet in a bank, not eight.
__device__ __forceinline__ int sum_index(int row, int token) {
    return row * TOKENS + (token ^ (row & (NT < 4 ? NT : 4) - 1) * 8);
}

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ int4 load_from_block(const int4* mine, int rank) {
    unsigned there;
    int4 value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(mine)), "r"(rank));
    asm volatile("ld.shared::cluster.v4.s32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(there));
    return value;
}

// The output of one sum, or the sum itself.
struct Output {
    const float *x_scale, *channel_scales;  // shared memory, from the block's first token and row on
    const void* bias;
    void* y;
    int rows, first_token, row0;

    __device__ __forceinline__ float value(int sum, int row, int token) const {
        const float scaled = __fmul_rn(__fmul_rn(static_cast<float>(sum), x_scale[token]), channel_scales[row]);
        if (bias == nullptr) return scaled;
        if constexpr (OUT == 2) return __fadd_rn(scaled, static_cast<const float*>(bias)[row0 + row]);
        else return __fadd_rn(scaled, Half::to_float(static_cast<const unsigned short*>(bias)[row0 + row]));
    }
    __device__ __forceinline__ long long at(int row, int token) const {
        return static_cast<long long>(first_token + token) * rows + row0 + row;
    }
    __device__ __forceinline__ void store(int sum, int row, int token) const {
        if constexpr (OUT == 3) static_cast<int*>(y)[at(row, token)] = sum;
        else if constexpr (OUT == 2) static_cast<float*>(y)[at(row, token)] = value(sum, row, token);
        else static_cast<unsigned short*>(y)[at(row, token)] = Half::from_float(value(sum, row, token));
    }
    // Eight rows of 16-bit outputs: 16 bytes, aligned to them.
    __device__ __forceinline__ void store8(const int (&sum)[8], int row, int token) const {
        unsigned packed[4];
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float low = value(sum[2 * i], row + 2 * i, token);
            packed[i] = Half::pack(low, value(sum[2 * i + 1], row + 2 * i + 1, token));
        }
        *reinterpret_cast<uint4*>(static_cast<unsigned short*>(y) + at(row, token)) =
            make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
};

// Add up the sums of the cluster's blocks and write the outputs of `row_count` rows. Called by all threads.
__device__ __forceinline__ void write_outputs(int* sums, const Output& output, int rank, int row_count,
                                              int block_tokens) {
    int from = 0, to = row_count;
    __syncthreads();
#if SPLIT > 1
    // Each block takes its share of the rows; what the others hold of them is brought here.
    cluster_arrive();
    const int share = (row_count + SPLIT * 8 - 1) / (SPLIT * 8) * 8;
    from = min(rank * share, row_count), to = min(from + share, row_count);
    int4* const mine = reinterpret_cast<int4*>(sums);
    cluster_wait();
    #pragma unroll 2
    for (int i = from * (TOKENS / 4) + threadIdx.x; i < to * (TOKENS / 4); i += WARPS * 32) {
        int4 sum = mine[i];
        #pragma unroll
        for (int other = 1; other < SPLIT; ++other) {
            const int4 part = load_from_block(mine + i, (rank + other) % SPLIT);
            sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        mine[i] = sum;
    }
    cluster_arrive();  // no block may leave while another reads its sums: waited for at the end
    __syncthreads();
#endif
    if constexpr (NT == 1) {
        for (int token = 0; token < block_tokens; ++token)
            for (int row = from + threadIdx.x; row < to; row += WARPS * 32)
                output.store(sums[sum_index(row, token)], row, token);
    } else {
        const bool vector = OUT < 2 && output.rows % 8 == 0;
        for (int i = threadIdx.x; i < (to - from + 7) / 8 * TOKENS; i += WARPS * 32) {
            const int token = i % TOKENS, row = from + i / TOKENS * 8;
            if (token >= block_tokens) continue;
            int sum[8];
            #pragma unroll
            for (int r = 0; r < 8; ++r) sum[r] = sums[sum_index(row + r, token)];
            if (vector) {
                output.store8(sum, row, token);
            } else {
                #pragma unroll
                for (int r = 0; r < 8; ++r)
                    if (row + r < to) output.store(sum[r], row + r, token);
            }
        }
    }
#if SPLIT > 1
    cluster_wait();
#endif
}
