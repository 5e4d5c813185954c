// What kernels of pruning do in PTX beside mma.cuh: matrices and copies in shared memory.

#pragma once

#include "mma.cuh"

// threadIdx.x, read anew: what is computed from it takes no register before it is needed.
__device__ __forceinline__ int thread_now() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

// Four matrices of 8 by 8 from shared memory: lanes 8 i to 8 i + 7 have the addresses of the rows of the i-th, 16 bytes
// each. Lane l gets of each row l / 4, columns 2 (l % 4) and one more; `transposed`: rows 2 (l % 4) and one more, column l / 4.
__device__ __forceinline__ void load_matrices(unsigned (&m)[4], const unsigned* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row))));
}
__device__ __forceinline__ void load_transposed(unsigned (&m)[4], const unsigned* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row))));
}

__device__ __forceinline__ unsigned max_f16x2(unsigned a, unsigned b) {
    unsigned both;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    return both;
}

// Four bytes into shared memory, or zeros where there is nothing to read. Arrive with `copies_arrive`.
__device__ __forceinline__ void copy_word(void* to, const void* from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(to))), "l"(from), "r"(there ? 4 : 0)
                 : "memory");
}
__device__ __forceinline__ void copies_arrive() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// 1 / x of a power of two.
__device__ __forceinline__ float inverse_of_power(float x) { return __uint_as_float(0x7f000000u - __float_as_uint(x)); }
