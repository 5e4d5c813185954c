// The pieces of a row (decode.cu) put together, by their maxima and sums. Rows without tokens get zeros here; those that
// lie in one piece have been written.
//
//   out = sum_p 2^(M_p - M) o_p / sum_p 2^(M_p - M) l_p,    M = max_p M_p
//
// A block of 8 warps takes 8 / `shares` query heads of a row; `shares` warps, a power of two, divide the pieces of a head.
//
// Defines: D head size, DTYPE of out (0 bf16, 1 fp16), BS (tokens of a page). Grid: x rows, y blocks for the heads.

#include "line.cuh"
#include "numeric.cuh"

#if DTYPE == 0
using T = numeric::Bf16;
#else
using T = numeric::Fp16;
#endif

constexpr int WARPS = 8, VECTORS = (D + 127) / 128;  // of 4 channels, for a lane
constexpr int AHEAD = 8 / VECTORS;  // pieces whose loads are under way together
static_assert(D % 4 == 0, "");

__device__ __forceinline__ void add(float4& sum, const float4& x, float factor) {
    sum.x += x.x * factor, sum.y += x.y * factor, sum.z += x.z * factor, sum.w += x.w * factor;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    kv8_combine(const int* __restrict__ offsets, int rows, int blocks, const float* __restrict__ partial,
                const float* __restrict__ partial_stats, unsigned short* __restrict__ out, int heads, int shares) {
    __shared__ float4 sums[WARPS][VECTORS * 32];
    __shared__ float totals[WARPS];
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const int row = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int begin = offsets[row], end = offsets[row + 1], tiles = offsets[rows];
    const int pieces = min(blocks, tiles);
    // The piece that holds a tile: the last one that begins at it or before.
    const auto piece_of = [&](int tile) {
        return static_cast<int>(((static_cast<long long>(tile) + 1) * pieces - 1) / tiles);
    };
    const bool empty = end == begin;
    const int first = empty ? 0 : piece_of(begin), last = empty ? -1 : piece_of(end - 1);
    if (last == first) return;
    const auto place = [&](int piece) { return 2 * piece + (begin > piece_begin(piece, pieces, tiles)); };
    const int share = warp & (shares - 1), head = blockIdx.y * (WARPS / shares) + warp / shares;
    float4 sum[VECTORS] = {};
    float total = 0.0f, most = LOWEST;
    if (head < heads) {
        for (int p = first + lane; p <= last; p += 32)
            most = fmaxf(most, partial_stats[(static_cast<long long>(place(p)) * heads + head) * 2]);
        #pragma unroll
        for (int apart = 1; apart < 32; apart *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, apart));
        #pragma unroll AHEAD
        for (int p = first + share; p <= last; p += shares) {
            const long long at = static_cast<long long>(place(p)) * heads + head;
            const float2 stats = *reinterpret_cast<const float2*>(partial_stats + at * 2);
            const float factor = exp2_fast(stats.x - most);
            total += stats.y * factor;
            #pragma unroll
            for (int v = 0; v < VECTORS; ++v)
                if ((v * 32 + lane) * 4 < D)
                    add(sum[v], *reinterpret_cast<const float4*>(partial + at * D + (v * 32 + lane) * 4), factor);
        }
    }
    if (shares > 1) {
        #pragma unroll
        for (int v = 0; v < VECTORS; ++v) sums[warp][v * 32 + lane] = sum[v];
        if (lane == 0) totals[warp] = total;
        __syncthreads();
        if (share > 0) return;
        for (int other = warp + 1; other < warp + shares; ++other) {
            total += totals[other];
            #pragma unroll
            for (int v = 0; v < VECTORS; ++v) add(sum[v], sums[other][v * 32 + lane], 1.0f);
        }
    }
    if (head >= heads) return;
    const float factor = empty ? 0.0f : __fdividef(1.0f, total);
    #pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int channel = (v * 32 + lane) * 4;
        if (channel < D)
            *reinterpret_cast<uint2*>(out + (static_cast<long long>(row) * heads + head) * D + channel) = make_uint2(
                T::pack(sum[v].x * factor, sum[v].y * factor), T::pack(sum[v].z * factor, sum[v].w * factor));
    }
}
