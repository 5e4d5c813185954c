// How a block's share of the weight is dealt to its warps, and how it reaches shared memory ahead of its use.
//
// Defines: R, U, WARPS, STAGES; see fused.cuh.

#pragma once

constexpr int TILE_ROWS = 16, TILE_COLUMNS = 64, TILE_BYTES = 512, TILE_UINT4S = 32;
constexpr int STEP_COLUMNS = U * TILE_COLUMNS, UNIT_ROWS = R * TILE_ROWS;
// wgmma is issued by 4 warps together, each with a tile of the unit; mma.sync by one, with all of them.
constexpr int WARPS_OF_WORKER = R == 4 ? 4 : 1, WORKERS = WARPS / WARPS_OF_WORKER, WARP_TILES = R / WARPS_OF_WORKER;
constexpr int STAGE_BYTES = WARP_TILES * U * TILE_BYTES;
static_assert(STAGES >= 2, "one stage is read while another is filled");

__device__ __forceinline__ unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// 16 bytes, or zeros where there is nothing to read.
__device__ __forceinline__ void copy_async(unsigned to, const void* from, bool there = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0));
}

// The neighbours of these 16 bytes are wanted next: let the L2 fetch 256. (An eviction policy would be worth 1 % more,
// but ptxas 13.0 puts its descriptor into an odd register in some variants, which is an illegal instruction.)
__device__ __forceinline__ void copy_weight_async(unsigned to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from));
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }

template <int LEFT> __device__ __forceinline__ void wait_until_left() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Where a worker is: `left` steps from this one on are its own.
struct Cursor {
    int unit, step, left;
};

// The steps of a block as one line, unit by unit, within a unit step by step, and cut into a piece for each worker. The
// input channels, steps step0 to step1, come in phases of `phase_steps`, each a line of its own.
struct Line {
    int units, step0, step1, phase_steps;

    __device__ __forceinline__ int length(int phase) const { return min(phase_steps, step1 - phase); }
    __device__ __forceinline__ Cursor piece(int worker, int phase) const {
        const int steps = length(phase), total = units * steps;
        const int from = static_cast<int>(static_cast<long long>(worker) * total / WORKERS);
        const int to = static_cast<int>(static_cast<long long>(worker + 1) * total / WORKERS);
        return {from / steps, phase + from % steps, to - from};
    }
};

// A warp's part of the weights on its way through STAGES stages of shared memory, each thread fetching only what it reads
// itself. Counters down to the next unit and to the end of the piece make a step cost little.
struct WeightStream {
    const Line& line;
    const uint4* tiles;  // from this lane's 16 bytes of the first on
    int worker, tile_row0, last_tile_row, tile_columns;
    const uint4* from[WARP_TILES];
    int phase, unit, in_unit, left;

    // `tile_row0`: of the first of this warp's tiles in the block's first unit.
    __device__ __forceinline__ WeightStream(const Line& line, const uint4* tiles, int worker, int tile_row0,
                                            int tile_rows, int tile_columns)
        : line(line), tiles(tiles), worker(worker), tile_row0(tile_row0), last_tile_row(tile_rows - 1),
          tile_columns(tile_columns) {
        start(line.step0);
    }

    // Begin with the piece of this phase, or of the next one in which there is any.
    __device__ __forceinline__ void start(int begin) {
        left = 0;
        for (phase = begin; phase < line.step1; phase += line.phase_steps) {
            const Cursor at = line.piece(worker, phase);
            unit = at.unit, left = at.left, in_unit = phase + line.length(phase) - at.step;
            if (left > 0) return aim(at.step);
        }
    }
    // Tiles past the last channel repeat the last: computed, never written.
    __device__ __forceinline__ void aim(int step) {
        #pragma unroll
        for (int r = 0; r < WARP_TILES; ++r) {
            const long long tile = min(tile_row0 + unit * R + r, last_tile_row);
            from[r] = tiles + (tile * tile_columns + step * U) * TILE_UINT4S;
        }
    }
    __device__ __forceinline__ void fetch(unsigned to) {
        if (left > 0) {
            #pragma unroll
            for (int r = 0; r < WARP_TILES; ++r) {
                #pragma unroll
                for (int u = 0; u < U; ++u)
                    copy_weight_async(to + (r * U + u) * TILE_BYTES, from[r] + u * TILE_UINT4S);
                from[r] += U * TILE_UINT4S;
            }
            --in_unit;
            if (--left == 0) {
                start(phase + line.phase_steps);
            } else if (in_unit == 0) {
                in_unit = line.length(phase), ++unit;
                aim(phase);
            }
        }
        commit();  // empty at the end, so that counting groups stays right
    }
};
