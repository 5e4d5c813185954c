// W4A8 product for few tokens: packed weights are streamed once, sums are exact in int32.
//
//   y[t, n] = x_scale[t] * channel_scales[n] * sum_k x[t, k] * (w4[n, k] - z[n, j]) * s2[n, j]  (+ bias[n])
//
// The inner sum is taken group by group as s2 * (sum_k x * w4 - z * sum_k x): the tensor cores multiply the bare 4-bit
// codes, and what a group costs beyond that is two multiply-adds per output instead of two per weight. All of it is
// whole numbers, so it equals the product with the rebuilt int8 weight bit for bit.
//
// A cluster of SPLIT blocks owns a range of units (R tiles of 16 output channels); each of its blocks takes a slice of
// the input channels. Within a block, the steps (one unit by U tiles of 64 input channels) are dealt to the warps as
// one line cut into equal pieces, so that every shape keeps all warps busy; a warp adds what it has to the block's sums
// in shared memory whenever it leaves a unit. int32 addition is associative: the order makes no difference.
//
// Weights reach shared memory by cp.async, each thread fetching only what it reads itself, STAGES - 1 steps ahead.
// They do not depend on the kernel before this one, so with programmatic dependent launch they are under way while that
// one still runs. Activations lie in shared memory for `phase_steps` steps at a time, and beside them their sum over
// each step.
//
// Defines: those of fused.cuh.

#include "fused.cuh"

static_assert(R == 1 || R == 2, "a warp reads one tile or two of a unit");

__device__ __forceinline__ void mma(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Bring `length` steps of all tokens from column `column0` on into shared memory, and the sums over each step.
__device__ __forceinline__ void load_activations(unsigned char* x_tile, int* x_sums, const signed char* x, int tokens,
                                                 int columns, int x_pitch, int column0, int length) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, chunks = length * STEP_CHUNKS;
    if constexpr (NT == 1) {
        // Little to load: through registers, where the sums are a few instructions, and nothing waits for the weights.
        #pragma unroll 4
        for (int i = threadIdx.x; i - lane < tokens * chunks; i += WARPS * 32) {
            const int t = i / chunks, chunk = i - t * chunks, column = column0 + chunk * 16;
            uint4 value = make_uint4(0, 0, 0, 0);
            if (t < tokens && column < columns)
                value = *reinterpret_cast<const uint4*>(x + static_cast<long long>(t) * columns + column);
            constexpr int ONES = 0x01010101;
            int sum = __dp4a(static_cast<int>(value.x), ONES, __dp4a(static_cast<int>(value.y), ONES, 0));
            sum = __dp4a(static_cast<int>(value.z), ONES, __dp4a(static_cast<int>(value.w), ONES, sum));
            #pragma unroll
            for (int apart = 1; apart < STEP_CHUNKS; apart *= 2) sum += __shfl_xor_sync(~0u, sum, apart);
            if (t < tokens) {
                *reinterpret_cast<uint4*>(x_tile + t * x_pitch + chunk * 16) = value;
                if (chunk % STEP_CHUNKS == 0) x_sums[chunk / STEP_CHUNKS * TOKENS + t] = sum;
            }
        }
    } else {
        // Blocks start at different columns, so that they do not all ask the same part of the L2 at once.
        const int first = static_cast<int>(blockIdx.x * 8 % chunks);
        for (int t = warp; t < tokens; t += WARPS)
            for (int i = lane; i < chunks; i += 32) {
                const int chunk = i + first < chunks ? i + first : i + first - chunks, column = column0 + chunk * 16;
                const bool there = column < columns;
                const long long from = static_cast<long long>(t) * columns + (there ? column : 0);
                copy_async(shared_address(x_tile + t * x_pitch + chunk * 16), x + from, there);
            }
        commit();
        wait_until_left<0>();
        __syncthreads();
        // A product with ones: every row of the result holds the sums.
        for (int step = warp; step < length; step += WARPS)
            #pragma unroll
            for (int n = 0; n < NT; ++n) {
                int sum[4] = {};
                constexpr unsigned ONES[4] = {0x01010101, 0x01010101, 0x01010101, 0x01010101};
                #pragma unroll
                for (int u = 0; u < U; ++u) {
                    const int row = min(n * 8 + (lane >> 2), tokens - 1);
                    const uint4 b = *reinterpret_cast<const uint4*>(
                        x_tile + row * x_pitch + step * STEP_COLUMNS + u * TILE_COLUMNS + (lane & 3) * 16);
                    mma(sum, ONES, b.x, b.y);
                    mma(sum, ONES, b.z, b.w);
                }
                int* const to = x_sums + step * TOKENS + n * 8 + lane * 2;
                if (lane < 4) *reinterpret_cast<int2*>(to) = make_int2(sum[0], sum[1]);
            }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
    w4a8_fused(const signed char* __restrict__ x, const float* __restrict__ x_scale, const uint4* __restrict__ tiles,
               const unsigned char* __restrict__ group_params, const float* __restrict__ channel_scales,
               const void* __restrict__ bias, void* __restrict__ y, int tokens, int rows, int columns, int groups,
               int steps_per_group, int phase_steps, int most_units) {
    extern __shared__ __align__(128) unsigned char shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, worker = warp;
    const int rank = SPLIT == 1 ? 0 : blockIdx.x % SPLIT;
    const int cluster = blockIdx.x / SPLIT, clusters = gridDim.x / SPLIT;
    const int first_token = blockIdx.y * TOKENS;
    const int block_tokens = min(tokens - first_token, TOKENS);
    const int tile_rows = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const int steps = (columns + STEP_COLUMNS - 1) / STEP_COLUMNS;
    const int units = (tile_rows + R - 1) / R;
    const int unit0 = static_cast<int>(static_cast<long long>(cluster) * units / clusters);
    const int unit1 = static_cast<int>(static_cast<long long>(cluster + 1) * units / clusters);
    const int step0 = rank * steps / SPLIT, step1 = (rank + 1) * steps / SPLIT;
    const Line line{unit1 - unit0, step0, step1, phase_steps};
    const int group0 = step0 / steps_per_group, group_count = (step1 - 1) / steps_per_group - group0 + 1;
    // Rows of activations start 64 bytes apart modulo 128: a quarter of a warp reads two of them without a conflict.
    const int x_pitch = phase_steps * STEP_COLUMNS + (phase_steps * U & 1 ? 0 : 64);

    int* const sums = reinterpret_cast<int*>(shared);
    float* const scales = reinterpret_cast<float*>(sums + most_units * UNIT_ROWS * TOKENS);
    float* const x_scales = scales + most_units * UNIT_ROWS;
    unsigned char* const params = reinterpret_cast<unsigned char*>(x_scales + TOKENS);
    const int most_groups = min((steps + SPLIT - 1) / SPLIT / steps_per_group + 2, groups);
    int* const x_sums = reinterpret_cast<int*>(params + most_units * R * most_groups * 32);
    unsigned char* const x_tile = reinterpret_cast<unsigned char*>(x_sums + phase_steps * TOKENS);
    unsigned char* const stages = x_tile + min(tokens, TOKENS) * x_pitch;

    // Tiles past the last channel (the second of a pair) repeat the last: computed, never written.
    for (int i = threadIdx.x; i < (unit1 - unit0) * R * group_count * 2; i += WARPS * 32) {
        const int half = i & 1, group = (i >> 1) % group_count, tile = (i >> 1) / group_count;
        const long long row = min(unit0 * R + tile, tile_rows - 1);
        copy_async(shared_address(params + (tile * group_count + group) * 32 + half * 16),
                   group_params + (row * groups + group0 + group) * 32 + half * 16);
    }
    commit();

    WeightStream weights(line, tiles + lane, worker, unit0 * R, tile_rows, steps * U);
    const unsigned first_stage = shared_address(stages) + warp * (STAGES * STAGE_BYTES) + lane * 16;
    #pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) weights.fetch(first_stage + s * STAGE_BYTES);
    unsigned stage = first_stage, last_stage = first_stage + (STAGES - 1) * STAGE_BYTES;

    for (int i = threadIdx.x; i < most_units * UNIT_ROWS * TOKENS; i += WARPS * 32) sums[i] = 0;
    const int row0 = unit0 * UNIT_ROWS, row_count = min(unit1 * UNIT_ROWS, rows) - row0;
    for (int i = threadIdx.x; i < row_count; i += WARPS * 32) scales[i] = channel_scales[row0 + i];

    numeric::wait_for_previous();
    numeric::launch_dependents();
    if (threadIdx.x < block_tokens) x_scales[threadIdx.x] = x_scale[first_token + threadIdx.x];

    int total[R][NT][4] = {}, acc[R][NT][4] = {}, x_sum[NT][2] = {};
    // What a group adds to the sums: s2 * (acc - z * x_sum).
    const auto fold = [&](const unsigned char* at) {
        #pragma unroll
        for (int r = 0; r < R; ++r) {
            const unsigned p = *reinterpret_cast<const unsigned*>(at + r * group_count * 32);
            const int scale[2] = {static_cast<int>(p & 255), static_cast<int>(p >> 16 & 255)};
            const int zero[2] = {static_cast<int>(p >> 8 & 255), static_cast<int>(p >> 24)};
            #pragma unroll
            for (int n = 0; n < NT; ++n)
                #pragma unroll
                for (int i = 0; i < 4; ++i) {
                    total[r][n][i] += scale[i >> 1] * (acc[r][n][i] - zero[i >> 1] * x_sum[n][i & 1]);
                    acc[r][n][i] = 0;
                }
        }
        #pragma unroll
        for (int n = 0; n < NT; ++n) x_sum[n][0] = x_sum[n][1] = 0;
    };
    // Tokens past the last repeat the last: computed, never written.
    int x_row[NT];
    #pragma unroll
    for (int n = 0; n < NT; ++n) x_row[n] = min(n * 8 + (lane >> 2), block_tokens - 1) * x_pitch;
    const auto flush = [&](int unit) {
        const int row = unit * UNIT_ROWS + (lane >> 2);
        #pragma unroll
        for (int r = 0; r < R; ++r)
            #pragma unroll
            for (int n = 0; n < NT; ++n)
                #pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int token = n * 8 + (lane & 3) * 2 + (i & 1);
                    atomicAdd(sums + sum_index(row + r * TILE_ROWS + (i >> 1) * 8, token), total[r][n][i]);
                    total[r][n][i] = 0;
                }
    };

    for (int phase = step0; phase < step1; phase += phase_steps) {
        const int length = line.length(phase);
        if (phase > step0) __syncthreads();  // all have read the last phase's activations
        load_activations(x_tile, x_sums, x + static_cast<long long>(first_token) * columns, block_tokens, columns,
                         x_pitch, phase * STEP_COLUMNS, length);
        if (phase == step0) wait_until_left<STAGES - 1>();  // of the parameters' group
        __syncthreads();

        const Cursor at = line.piece(worker, phase);
        int unit = at.unit, left = at.left, in_unit = phase + length - at.step, in_group;
        const unsigned char* param_at;
        const unsigned char* b_at;
        const int* x_sum_at;
        const auto enter = [&](int step) {
            param_at = params + (unit * R * group_count + step / steps_per_group - group0) * 32 +
                       (lane >> 2) * 4;
            b_at = x_tile + (step - phase) * STEP_COLUMNS + (lane & 3) * 16;
            x_sum_at = x_sums + (step - phase) * TOKENS + (lane & 3) * 2;
            in_group = step % steps_per_group;
        };
        enter(at.step);
        for (; left > 0; --left) {
            wait_until_left<STAGES - 2>();
            // The stage that was read one step ago: its values are in registers for certain.
            weights.fetch(last_stage);
            #pragma unroll
            for (int u = 0; u < U; ++u) {
                unsigned a[R][2][4];
                #pragma unroll
                for (int r = 0; r < R; ++r) {
                    uint4 w;
                    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                                 : "r"(stage + (r * U + u) * TILE_BYTES));
                    constexpr unsigned LOW = 0x0f0f0f0fu;
                    a[r][0][0] = w.x & LOW, a[r][0][2] = w.x >> 4 & LOW;
                    a[r][1][0] = w.y & LOW, a[r][1][2] = w.y >> 4 & LOW;
                    a[r][0][1] = w.z & LOW, a[r][0][3] = w.z >> 4 & LOW;
                    a[r][1][1] = w.w & LOW, a[r][1][3] = w.w >> 4 & LOW;
                }
                #pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const uint4 b = *reinterpret_cast<const uint4*>(b_at + u * TILE_COLUMNS + x_row[n]);
                    #pragma unroll
                    for (int r = 0; r < R; ++r) {
                        mma(acc[r][n], a[r][0], b.x, b.y);
                        mma(acc[r][n], a[r][1], b.z, b.w);
                    }
                }
            }
            #pragma unroll
            for (int n = 0; n < NT; ++n) {
                const int2 s = *reinterpret_cast<const int2*>(x_sum_at + n * 8);
                x_sum[n][0] += s.x, x_sum[n][1] += s.y;
            }
            b_at += STEP_COLUMNS, x_sum_at += TOKENS;
            last_stage = stage;
            stage = stage == first_stage + (STAGES - 1) * STAGE_BYTES ? first_stage : stage + STAGE_BYTES;
            const bool leaves = --in_unit == 0 || left == 1;
            if (ONE_GROUP || ++in_group == steps_per_group || leaves) {
                fold(param_at);
                in_group = 0, param_at += 32;
            }
            if (leaves) {
                flush(unit);
                in_unit = length, ++unit;
                enter(phase);
            }
        }
    }

    write_outputs(sums, {x_scales, scales, bias, y, rows, first_token, row0}, rank, row_count, block_tokens);
}
