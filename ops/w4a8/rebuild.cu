// w8'[n, k] = (w4[n, k] - z[n, j]) * s2[n, j] of a whole weight, int8 [rows, columns]: a W8A8 product does the rest.
//
// A warp takes TILES tiles along the input channels at once, so that it writes runs of 64 * TILES bytes of 16 rows.

#include "numeric.cuh"
#include "rebuild.cuh"

constexpr int TILE_ROWS = 16, TILE_COLUMNS = 64;

extern "C" __global__ void __launch_bounds__(256)
    w4a8_rebuild(const uint4* __restrict__ tiles, const unsigned* __restrict__ group_params,
                 signed char* __restrict__ out, int rows, int columns, int groups, int tiles_per_group) {
    const int lane = threadIdx.x & 31;
    const int tile_columns = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int pieces = (tile_columns + TILES - 1) / TILES;
    const int item = blockIdx.x * 8 + (threadIdx.x >> 5);
    const int tile_row = item / pieces, step0 = item % pieces * TILES;
    const int row = tile_row * TILE_ROWS + (lane >> 2);
    if (tile_row * TILE_ROWS < rows) {
        uint4 w[TILES];
        unsigned p[TILES];
        #pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const int step = min(step0 + i, tile_columns - 1);
            w[i] = __ldcs(tiles + (static_cast<long long>(tile_row) * tile_columns + step) * 32 + lane);
            p[i] = group_params[(static_cast<long long>(tile_row) * groups + step / tiles_per_group) * 8 + (lane >> 2)];
        }
        numeric::wait_for_previous();  // the buffer may still be read by the product before this
        numeric::launch_dependents();
        #pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const unsigned scale0 = p[i] & 255, scale1 = p[i] >> 16 & 255;
            const unsigned offset0 = rebuild_offset(scale0, p[i] >> 8 & 255);
            const unsigned offset1 = rebuild_offset(scale1, p[i] >> 24);
            constexpr unsigned LOW = 0x0f0f0f0fu;
            const int column = (step0 + i) * TILE_COLUMNS + (lane & 3) * 16;
            if (column >= columns) continue;  // 16 columns are all there or all not
            signed char* const to = out + static_cast<long long>(row) * columns + column;
            if (row < rows)
                *reinterpret_cast<uint4*>(to) = make_uint4(
                    rebuild(w[i].x & LOW, scale0, offset0), rebuild(w[i].x >> 4 & LOW, scale0, offset0),
                    rebuild(w[i].y & LOW, scale0, offset0), rebuild(w[i].y >> 4 & LOW, scale0, offset0));
            if (row + 8 < rows)
                *reinterpret_cast<uint4*>(to + 8ll * columns) = make_uint4(
                    rebuild(w[i].z & LOW, scale1, offset1), rebuild(w[i].z >> 4 & LOW, scale1, offset1),
                    rebuild(w[i].w & LOW, scale1, offset1), rebuild(w[i].w >> 4 & LOW, scale1, offset1));
        }
    }
}
