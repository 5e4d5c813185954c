// Tiles on their way into shared memory: mbarriers, and the copies that complete on them.
//
// Defines needed: HEADS, BS; GROUP, WIDTH, TOKEN_BYTES, HALF_BYTES, STAGE_BYTES.

#pragma once

#include "line.cuh"

__device__ __forceinline__ unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Copies complete on an mbarrier: bulk copies where there are any, from compute capability 9.0 on, else a warp's cp.async.
// A test defines it as 0, to run the other copies there too.
#ifndef BULK_COPIES
#define BULK_COPIES (__CUDA_ARCH__ >= 900)
#endif
#if BULK_COPIES
constexpr int FULL_ARRIVALS = 1;
#define TEST "mbarrier.try_wait.parity"
#else
constexpr int FULL_ARRIVALS = 32;
#define TEST "mbarrier.test_wait.parity"
#endif

__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
    unsigned done;
    do {
        asm volatile("{.reg .pred p; " TEST ".shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    } while (!done);
}
__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(barrier) : "memory");
}

// A tile of keys from `keys` on and its values, half a page further, for the heads of this block. Called by a warp.
__device__ __forceinline__ void copy_tile(unsigned to, const signed char* keys, unsigned barrier) {
    constexpr int PITCH = HEADS * WIDTH, HALF_PAGE = BS * PITCH;
    const int lane = threadIdx.x & 31;
#if BULK_COPIES
    constexpr int COPIES = GROUP == HEADS ? 1 : TILE, BYTES = HALF_BYTES / COPIES;
    if (lane == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "n"(STAGE_BYTES)
                     : "memory");
    __syncwarp();
    if (lane < 2 * COPIES) {
        const int half = lane / COPIES, t = lane % COPIES;
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     ::"r"(to + half * HALF_BYTES + t * BYTES), "l"(keys + half * HALF_PAGE + t * PITCH), "n"(BYTES),
                     "r"(barrier) : "memory");
    }
#else
    #pragma unroll 4
    for (int i = lane; i < STAGE_BYTES / 16; i += 32) {
        const int half = i / (HALF_BYTES / 16), in_half = i % (HALF_BYTES / 16) * 16;
        const int from = GROUP == HEADS ? in_half : in_half / TOKEN_BYTES * PITCH + in_half % TOKEN_BYTES;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i * 16), "l"(keys + half * HALF_PAGE + from)
                     : "memory");
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}

// Before the warp that copied ends, as arrivals are still to come from it.
__device__ __forceinline__ void copies_end() {
#if !BULK_COPIES
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
