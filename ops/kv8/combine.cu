// The pieces of a row (decode.cu) put together, by their maxima and sums. Rows that lie in one piece, and rows without
// tokens, have been written.
//
//   out = sum_p 2^(M_p - M) o_p / sum_p 2^(M_p - M) l_p,    M = max_p M_p
//
// A block of 8 warps takes 8 / `shares` query heads of a row; `shares` warps, a power of two, divide the pieces of a head.
// Blocks along x are rows or, where rows are more, the cuts between pieces: the first cut within a row is that row's.
//
// What the step's plan says is read before kv8_decode, which is the kernel before this, has ended: it has waited for
// whatever wrote the plan before it let this kernel start.
//
// Defines: D head size, DTYPE of out (0 bf16, 1 fp16), BS (tokens of a page). Grid: x rows or, if those are more, pieces
// less one; y blocks for the heads.

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
    __shared__ float2 totals[WARPS];
    const Plan plan{offsets, nullptr, rows};
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int looked_at = plan.look(), tiles = plan.tiles(), pieces = min(blocks, tiles);
    const bool by_cut = gridDim.x < rows;
    const int cut = blockIdx.x + 1;
    bool mine = by_cut ? cut < pieces : pieces > 0;
    int row = blockIdx.x;
    if (by_cut && mine) row = plan.row_of(piece_begin(cut, pieces, tiles), looked_at);
    const int begin = offsets[row], end = offsets[row + 1];
    int first = 0, last = 0, first_place = 0;
    if (mine && end > begin) {
        // The piece that holds a tile: the last one that begins at it or before.
        const auto piece_of = [&](int tile) {
            return static_cast<int>(((static_cast<long long>(tile) + 1) * pieces - 1) / tiles);
        };
        first = piece_of(begin), last = piece_of(end - 1);
        mine = first < last && (!by_cut || first + 1 == cut);
        // Of its two places a piece uses the first for the row that it begins with.
        first_place = 2 * first + (begin > piece_begin(first, pieces, tiles));
    } else {
        mine = false;
    }
    numeric::wait_for_previous();
    numeric::launch_dependents();
    if (!mine) return;
    const int share = warp & (shares - 1), head = blockIdx.y * (WARPS / shares) + warp / shares;
    float4 sum[VECTORS] = {};
    float total = 0.0f, most = LOWEST;
    const auto rescale = [&](float greater) {
        const float factor = exp2_fast(most - greater);
        total *= factor, most = greater;
        #pragma unroll
        for (int v = 0; v < VECTORS; ++v) sum[v].x *= factor, sum[v].y *= factor, sum[v].z *= factor, sum[v].w *= factor;
    };
    for (int p = first + share; p <= last && head < heads; p += AHEAD * shares) {
        float2 stats[AHEAD];
        float4 parts[AHEAD][VECTORS];
        float greater = most;
        #pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int piece = p + a * shares;
            const long long at = (piece == first ? first_place : 2ll * piece) * heads + head;
            stats[a] = make_float2(LOWEST, 0.0f);
            if (piece <= last) stats[a] = *reinterpret_cast<const float2*>(partial_stats + at * 2);
            #pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                const int channel = (v * 32 + lane) * 4;
                parts[a][v] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (piece <= last && channel < D)
                    parts[a][v] = *reinterpret_cast<const float4*>(partial + at * D + channel);
            }
        }
        #pragma unroll
        for (int a = 0; a < AHEAD; ++a) greater = fmaxf(greater, stats[a].x);
        rescale(greater);
        #pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const float factor = exp2_fast(stats[a].x - most);
            total += stats[a].y * factor;
            #pragma unroll
            for (int v = 0; v < VECTORS; ++v) add(sum[v], parts[a][v], factor);
        }
    }
    if (shares > 1) {
        #pragma unroll
        for (int v = 0; v < VECTORS; ++v) sums[warp][v * 32 + lane] = sum[v];
        if (lane == 0) totals[warp] = make_float2(most, total);
        __syncthreads();
        if (share > 0) return;
        for (int other = warp + 1; other < warp + shares; ++other) {
            const float2 theirs = totals[other];
            rescale(fmaxf(most, theirs.x));
            const float factor = exp2_fast(theirs.x - most);
            total += theirs.y * factor;
            #pragma unroll
            for (int v = 0; v < VECTORS; ++v) add(sum[v], sums[other][v * 32 + lane], factor);
        }
    }
    if (head >= heads) return;
    const float factor = __fdividef(1.0f, total);
    #pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int channel = (v * 32 + lane) * 4;
        if (channel < D)
            *reinterpret_cast<uint2*>(out + (static_cast<long long>(row) * heads + head) * D + channel) = make_uint2(
                T::pack(sum[v].x * factor, sum[v].y * factor), T::pack(sum[v].z * factor, sum[v].w * factor));
    }
}
