// The line of tiles that the decode kernels share out between blocks, as kv8_plan lays it out once a step.
//
// TILE tokens to a tile, the tiles of all rows one behind the other; leading pages of the null block are not in it.
// Piece p of n holds tiles [piece_begin(p), piece_begin(p + 1)): equal shares, whatever the lengths of the rows.
//
// Defines needed: BS, tokens of a page.

#pragma once

#include "mma.cuh"

constexpr int TILE = 16;
static_assert(BS % TILE == 0, "a tile lies in one page");
// What a maximum of scores starts from. Finite, so that the difference of two of them is a number.
constexpr float LOWEST = -3.0e38f;

// Which pages there are, from kv8_plan: `tiles` of all rows together and `offsets[r]`, those of the rows before r;
// `first_page[r]`: pages of the row that are skipped, null blocks.
struct Plan {
    const int* offsets;     // [rows + 1]
    const int* first_page;  // [rows]
    int rows;

    __device__ __forceinline__ int tiles() const { return offsets[rows]; }
    // The row whose tiles hold this one: as many rows as end at it or before. The whole block calls it, with what each
    // thread `looked_at`; that read and the one that says which tile are then under way together.
    __device__ __forceinline__ int look() const { return offsets[min(static_cast<int>(threadIdx.x) + 1, rows)]; }
    __device__ __forceinline__ int row_of(int tile, int looked_at) const {
        int row = __syncthreads_count(looked_at <= tile);
        for (int base = blockDim.x + 1; base < rows; base += blockDim.x)
            row += __syncthreads_count(offsets[min(base + static_cast<int>(threadIdx.x), rows)] <= tile);
        return row;
    }
};

__device__ __forceinline__ int piece_begin(int piece, int pieces, int tiles) {
    return static_cast<int>(static_cast<long long>(piece) * tiles / pieces);
}
