// W4A8 product for more tokens than fused.cu is fast for, on Hopper: the same packed weights, streamed once and rebuilt
// to int8 in registers, times activations that the tensor cores read from shared memory themselves (wgmma).
//
//   y[t, n] = x_scale[t] * channel_scales[n] * sum_k x[t, k] * w8'[n, k]  (+ bias[n]),   w8' = (w4 - z) * s2
//
// A unit is 64 output channels, one tile for each warp of a warpgroup. As in fused.cu a cluster of SPLIT blocks owns a
// range of units and each of its blocks a slice of the input channels; here the line of steps is dealt to warpgroups.
// Reading the activations once for 64 channels, not once for 16, is what makes it faster from about 16 tokens on.
//
// Activations lie in shared memory as wgmma's K-major layout without swizzle wants them: chunk after chunk of 16 input
// channels, in each chunk 16 bytes a token. Within 64 channels the words of the four chunks are dealt out as the packed
// weight deals its nibbles: chunk j, word q is channels 16 q + 4 j to 16 q + 4 j + 3 (layout.py).
//
// Defines: those of fused.cuh.

#include "fused.cuh"
#include "rebuild.cuh"

static_assert(R == 4 && WARPS % 4 == 0, "wgmma is issued by groups of 4 warps, with a tile each");
constexpr int CHUNK_BYTES = TOKENS * 16;

// d += a b with the rows of this warp in `a`. `b` is the low word of a descriptor: where the chunk starts, and in the
// upper half how far it is to the next one; the high word: how far to the next 8 tokens. All in 16 bytes, no swizzle.
constexpr unsigned TOKEN_STRIDE = 128 >> 4, CHUNK_STRIDE = CHUNK_BYTES >> 4;

__device__ __forceinline__ void multiply(int (&d)[4 * NT], const unsigned (&a)[4], unsigned b) {
#if NT == 2
    asm volatile("{.reg .pred p; .reg .b64 b; setp.eq.u32 p, 1, 1;"
                 "mov.b64 b, {%12, %13};"
                 "wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7"
                 "}, {%8, %9, %10, %11}, b, p;}"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(TOKEN_STRIDE));
#endif
#if NT == 4
    asm volatile("{.reg .pred p; .reg .b64 b; setp.eq.u32 p, 1, 1;"
                 "mov.b64 b, {%20, %21};"
                 "wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
                 "}, {%16, %17, %18, %19}, b, p;}"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]),
                   "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(TOKEN_STRIDE));
#endif
#if NT == 8
    asm volatile("{.reg .pred p; .reg .b64 b; setp.eq.u32 p, 1, 1;"
                 "mov.b64 b, {%36, %37};"
                 "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
                 "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                 "}, {%32, %33, %34, %35}, b, p;}"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]),
                   "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]),
                   "+r"(d[15]), "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]),
                   "+r"(d[22]), "+r"(d[23]), "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]),
                   "+r"(d[29]), "+r"(d[30]), "+r"(d[31])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(TOKEN_STRIDE));
#endif
#if NT == 16
    asm volatile("{.reg .pred p; .reg .b64 b; setp.eq.u32 p, 1, 1;"
                 "mov.b64 b, {%68, %69};"
                 "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
                 "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
                 "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
                 "%62, %63"
                 "}, {%64, %65, %66, %67}, b, p;}"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]),
                   "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]),
                   "+r"(d[15]), "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]),
                   "+r"(d[22]), "+r"(d[23]), "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]),
                   "+r"(d[29]), "+r"(d[30]), "+r"(d[31]), "+r"(d[32]), "+r"(d[33]), "+r"(d[34]), "+r"(d[35]),
                   "+r"(d[36]), "+r"(d[37]), "+r"(d[38]), "+r"(d[39]), "+r"(d[40]), "+r"(d[41]), "+r"(d[42]),
                   "+r"(d[43]), "+r"(d[44]), "+r"(d[45]), "+r"(d[46]), "+r"(d[47]), "+r"(d[48]), "+r"(d[49]),
                   "+r"(d[50]), "+r"(d[51]), "+r"(d[52]), "+r"(d[53]), "+r"(d[54]), "+r"(d[55]), "+r"(d[56]),
                   "+r"(d[57]), "+r"(d[58]), "+r"(d[59]), "+r"(d[60]), "+r"(d[61]), "+r"(d[62]), "+r"(d[63])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(TOKEN_STRIDE));
#endif
}

// Bring `length` steps of all tokens from column `column0` on into shared memory.
__device__ __forceinline__ void load_activations(unsigned char* x_tile, const signed char* x, int tokens, int columns,
                                                 int column0, int length) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, blocks = length * U;
    // A warp reads 64 bytes of 8 tokens at once; rows past the last token hold zeros.
    #pragma unroll 8
    for (int i = warp; i < blocks * NT; i += WARPS) {
        const int block = i / NT, t = i % NT * 8 + (lane >> 2);
        const int column = column0 + block * TILE_COLUMNS + (lane & 3) * 16;
        uint4 value = make_uint4(0, 0, 0, 0);
        if (t < tokens && column < columns)
            value = *reinterpret_cast<const uint4*>(x + static_cast<long long>(t) * columns + column);
        unsigned* const to = reinterpret_cast<unsigned*>(x_tile + block * 4 * CHUNK_BYTES + t * 16) + (lane & 3);
        constexpr int CHUNK = CHUNK_BYTES / 4;
        to[0] = value.x, to[CHUNK] = value.y, to[2 * CHUNK] = value.z, to[3 * CHUNK] = value.w;
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
    w4a8_fused_wgmma(const signed char* __restrict__ x, const float* __restrict__ x_scale,
                     const uint4* __restrict__ tiles, const unsigned char* __restrict__ group_params,
                     const float* __restrict__ channel_scales, const void* __restrict__ bias, void* __restrict__ y,
                     int tokens, int rows, int columns, int groups, int steps_per_group, int phase_steps,
                     int most_units) {
    extern __shared__ __align__(128) unsigned char shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int rank = SPLIT == 1 ? 0 : blockIdx.x % SPLIT;
    const int cluster = blockIdx.x / SPLIT, clusters = gridDim.x / SPLIT;
    const int first_token = blockIdx.y * TOKENS;
    const int block_tokens = min(tokens - first_token, TOKENS);
    const int tile_rows = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const int steps = (columns + STEP_COLUMNS - 1) / STEP_COLUMNS;
    const int units = (tile_rows + R - 1) / R, worker = warp >> 2, member = warp & 3;
    const int unit0 = static_cast<int>(static_cast<long long>(cluster) * units / clusters);
    const int unit1 = static_cast<int>(static_cast<long long>(cluster + 1) * units / clusters);
    const int step0 = rank * steps / SPLIT, step1 = (rank + 1) * steps / SPLIT;
    const Line line{unit1 - unit0, step0, step1, phase_steps};
    const int group0 = step0 / steps_per_group, group_count = (step1 - 1) / steps_per_group - group0 + 1;
    int* const sums = reinterpret_cast<int*>(shared);
    float* const scales = reinterpret_cast<float*>(sums + most_units * UNIT_ROWS * TOKENS);
    float* const x_scales = scales + most_units * UNIT_ROWS;
    unsigned char* const params = reinterpret_cast<unsigned char*>(x_scales + TOKENS);
    const int most_groups = min((steps + SPLIT - 1) / SPLIT / steps_per_group + 2, groups);
    // Descriptors count in 16 bytes; core matrices of 8 tokens by 16 bytes are 128 apart.
    unsigned char* const x_tile = params + most_units * R * most_groups * 32;
    unsigned char* const stages = x_tile + phase_steps * U * 4 * CHUNK_BYTES;

    // Tiles past the last channel repeat the last: computed, never written.
    for (int i = threadIdx.x; i < (unit1 - unit0) * R * group_count * 2; i += WARPS * 32) {
        const int half = i & 1, group = (i >> 1) % group_count, tile = (i >> 1) / group_count;
        const long long row = min(unit0 * R + tile, tile_rows - 1);
        copy_async(shared_address(params + (tile * group_count + group) * 32 + half * 16),
                   group_params + (row * groups + group0 + group) * 32 + half * 16);
    }
    commit();

    WeightStream weights(line, tiles + lane, worker, unit0 * R + member, tile_rows, steps * U);
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

    int acc[4 * NT] = {};
    const auto flush = [&](int unit) {
        const int row = unit * UNIT_ROWS + member * TILE_ROWS + (lane >> 2);
        #pragma unroll
        for (int i = 0; i < 4 * NT; ++i) {
            atomicAdd(sums + sum_index(row + (i >> 1 & 1) * 8, (i >> 2) * 8 + (lane & 3) * 2 + (i & 1)), acc[i]);
            acc[i] = 0;
        }
    };

    for (int phase = step0; phase < step1; phase += phase_steps) {
        const int length = line.length(phase);
        if (phase > step0) __syncthreads();  // all have read the last phase's activations
        load_activations(x_tile, x + static_cast<long long>(first_token) * columns, block_tokens, columns,
                         phase * STEP_COLUMNS, length);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the tensor cores read what threads wrote
        if (phase == step0) wait_until_left<STAGES - 1>();  // of the parameters' group
        __syncthreads();

        const Cursor at = line.piece(worker, phase);
        int unit = at.unit, left = at.left, in_unit = phase + length - at.step, in_group;
        const unsigned char* param_at;
        // 14 bits: in a cluster, shared addresses have the block's rank above them.
        const unsigned b_first = shared_address(x_tile) >> 4 & 0x3fff | CHUNK_STRIDE << 16;
        unsigned b_at;
        const auto enter = [&](int step) {
            param_at = params + ((unit * R + member) * group_count + step / steps_per_group - group0) * 32 +
                       (lane >> 2) * 4;
            b_at = b_first + (step - phase) * (U * 4 * CHUNK_STRIDE);
            in_group = step % steps_per_group;
        };
        enter(at.step);
        for (; left > 0; --left) {
            wait_until_left<STAGES - 2>();
            // The stage that was read one step ago: its values are in registers for certain.
            weights.fetch(last_stage);
            const unsigned p = *reinterpret_cast<const unsigned*>(param_at);
            const unsigned scale0 = p & 255, scale1 = p >> 16 & 255;
            const unsigned offset0 = rebuild_offset(scale0, p >> 8 & 255), offset1 = rebuild_offset(scale1, p >> 24);
            unsigned a[U][2][4];
            #pragma unroll
            for (int u = 0; u < U; ++u) {
                uint4 w;
                asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                             : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                             : "r"(stage + u * TILE_BYTES));
                constexpr unsigned LOW = 0x0f0f0f0fu;
                a[u][0][0] = rebuild(w.x & LOW, scale0, offset0), a[u][0][2] = rebuild(w.x >> 4 & LOW, scale0, offset0);
                a[u][1][0] = rebuild(w.y & LOW, scale0, offset0), a[u][1][2] = rebuild(w.y >> 4 & LOW, scale0, offset0);
                a[u][0][1] = rebuild(w.z & LOW, scale1, offset1), a[u][0][3] = rebuild(w.z >> 4 & LOW, scale1, offset1);
                a[u][1][1] = rebuild(w.w & LOW, scale1, offset1), a[u][1][3] = rebuild(w.w >> 4 & LOW, scale1, offset1);
            }
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            #pragma unroll
            for (int u = 0; u < U; ++u)
                #pragma unroll
                for (int m = 0; m < 2; ++m) multiply(acc, a[u][m], b_at + (u * 4 + m * 2) * CHUNK_STRIDE);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            b_at += U * 4 * CHUNK_STRIDE;
            last_stage = stage;
            stage = stage == first_stage + (STAGES - 1) * STAGE_BYTES ? first_stage : stage + STAGE_BYTES;
            const bool leaves = --in_unit == 0 || left == 1;
            if (ONE_GROUP) {
                param_at += 32;
            } else if (++in_group == steps_per_group) {
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
