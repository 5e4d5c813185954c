// Attention of one new token per row over the int8 cache (layout.py), in pieces. kv8_combine puts the pieces together.
//
//   out[r, h] = sum_t softmax_t(scale * q[r, h] . k[t]) v[t]      k[t] = k8[t] * sk[t],  v[t] = v8[t] * sv[t]
//
// Each block gets a piece of the line (line.cuh), so every multiprocessor streams the same number of bytes. One warp
// brings tiles, keys and values of the block's KV heads, into shared memory ahead of use; each of the others computes
// with one KV head and up to 8 of its query heads (attend.cuh); SHARING warps take a head's tiles in turn.
//
// A row that lies in one block is written at once; other parts go to `partial` as unnormalised sums, with their M and
// sum in `partial_stats`: two places a block, as its first row and its last may go on in others.
//
// Defines: D head size, DTYPE of q and out (0 bf16, 1 fp16), HEADS (KV heads of the cache), GROUP (of them in a block),
// RATIO (query heads of a KV head), BS (tokens of a page), SHARING, STAGES (tiles in shared memory).
// Grid: x pieces, y HEADS / GROUP. Shared memory: decode_shape.py.

constexpr int WIDTH = D + 4, TOKEN_BYTES = GROUP * WIDTH, HALF_BYTES = 16 * TOKEN_BYTES, STAGE_BYTES = 2 * HALF_BYTES;

#include "attend.cuh"
#include "pipeline.cuh"

constexpr int QUERY_GROUPS = (RATIO + 7) / 8;
constexpr int HEAD_WARPS = GROUP * QUERY_GROUPS;
constexpr int WARPS = HEAD_WARPS * SHARING;
static_assert(HEADS % GROUP == 0, "");
static_assert(GROUP == HEADS || TOKEN_BYTES % 16 == 0, "heads of a token are copied in multiples of 16 bytes");

extern "C" __global__ void __launch_bounds__(WARPS * 32 + 32, 1)
    kv8_decode(const unsigned short* __restrict__ q, long long q_pitch, const signed char* __restrict__ cache,
               long long page_bytes, const int* __restrict__ block_table, int table_pitch,
               const int* __restrict__ seq_lens, const int* __restrict__ offsets, const int* __restrict__ first_page,
               int rows, float scale, unsigned short* __restrict__ out,
               float* __restrict__ partial, float* __restrict__ partial_stats) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ __align__(8) unsigned long long barriers[2 * STAGES];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const unsigned stages = shared_address(shared), full = shared_address(barriers), empty = full + 8 * STAGES;
    const Plan plan{offsets, first_page, rows};
    const int group0 = blockIdx.y * GROUP;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier_init(full + 8 * i, FULL_ARRIVALS), barrier_init(empty + 8 * i, WARPS);
#if BULK_COPIES
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    __syncthreads();
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const int tiles = plan.tiles();
    const int pieces = min(static_cast<int>(gridDim.x), tiles);  // so that none is empty
    if (blockIdx.x >= pieces) return;
    const int begin = piece_begin(blockIdx.x, pieces, tiles), end = piece_begin(blockIdx.x + 1, pieces, tiles);
    int row = plan.row_of(begin);

    if (warp == WARPS) {
        // The producer: 32 page numbers at a time, then a copy of keys and one of values for each tile.
        int slot = 0;
        unsigned parity = 1;
        for (int base = begin; base < end; base += 32) {
            const int mine = min(base + lane, end - 1);
            int r = row;
            while (offsets[r + 1] <= mine) ++r;
            const int token = first_page[r] * BS + (mine - offsets[r]) * TILE;
            const int page = block_table[static_cast<long long>(r) * table_pitch + token / BS];
            const signed char* from = cache + page * page_bytes + (token % BS * HEADS + group0) * WIDTH;
            row = __shfl_sync(~0u, r, 31);
            for (int i = 0; i < min(32, end - base); ++i) {
                const signed char* const keys =
                    reinterpret_cast<const signed char*>(__shfl_sync(~0u, reinterpret_cast<long long>(from), i));
                barrier_wait(empty + 8 * slot, parity);
                copy_tile(stages + slot * STAGE_BYTES, keys, full + 8 * slot);
                if (++slot == STAGES) slot = 0, parity ^= 1;
            }
        }
        copies_end();
        return;
    }

    const int head_warp = warp % HEAD_WARPS, share = warp / HEAD_WARPS;
    const int head = head_warp / QUERY_GROUPS, query0 = head_warp % QUERY_GROUPS * 8;
    const int query_heads = min(RATIO - query0, 8);
    const long long first_query = (group0 + head) * RATIO + query0;
    int slot = 0;
    unsigned parity = 0;
    for (int tile = begin; tile < end; ++row) {
        const int row_begin = offsets[row], row_end = offsets[row + 1];
        if (row_end <= tile) continue;  // a row without tokens
        const int until = min(end, row_end);
        const int length = seq_lens[row] - first_page[row] * BS;
        unsigned query[KSTEPS][2];
        float scale_log2[2];
        load_query(query, scale_log2, q + row * q_pitch + first_query * D, query_heads, scale);
        State state;
        state.clear();
        const bool whole = tile <= row_begin && until == row_end;
        for (; tile < until; ++tile) {
            barrier_wait(full + 8 * slot, parity);
            if (SHARING == 1 || tile % SHARING == share) {
                const unsigned keys = stages + slot * STAGE_BYTES + head * WIDTH;
                attend(state, query, keys, keys + HALF_BYTES, length - (tile - row_begin) * TILE, scale_log2);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * slot);
            if (++slot == STAGES) slot = 0, parity ^= 1;
        }
        state.sum[0] = sum_over_tokens(state.sum[0]), state.sum[1] = sum_over_tokens(state.sum[1]);
        if (SHARING > 1) {
            // The first of a head's warps takes over what the others have.
            constexpr int FLOATS = 8 * VSTEPS + 4;
            const auto part = [&](int of_warp) {
                float* const parts = reinterpret_cast<float*>(shared + STAGES * STAGE_BYTES);
                return parts + ((of_warp - HEAD_WARPS) * 32 + lane) * FLOATS;
            };
            asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");  // the last row's have been read
            if (share > 0) {
                float* const mine = part(warp);
                #pragma unroll
                for (int i = 0; i < 2 * VSTEPS; ++i)
                    *reinterpret_cast<float4*>(mine + 4 * i) =
                        make_float4(state.out[i][0], state.out[i][1], state.out[i][2], state.out[i][3]);
                *reinterpret_cast<float4*>(mine + 8 * VSTEPS) =
                    make_float4(state.most[0], state.most[1], state.sum[0], state.sum[1]);
            }
            asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
            if (share > 0) continue;
            for (int other = 1; other < SHARING; ++other) {
                const float* const theirs = part(warp + other * HEAD_WARPS);
                const float4 stats = *reinterpret_cast<const float4*>(theirs + 8 * VSTEPS);
                const float most[2] = {fmaxf(state.most[0], stats.x), fmaxf(state.most[1], stats.y)};
                state.rescale(most);
                const float factor[2] = {exp2_fast(stats.x - most[0]), exp2_fast(stats.y - most[1])};
                state.sum[0] += stats.z * factor[0], state.sum[1] += stats.w * factor[1];
                #pragma unroll
                for (int i = 0; i < 2 * VSTEPS; ++i)
                    #pragma unroll
                    for (int c = 0; c < 4; ++c) state.out[i][c] += theirs[4 * i + c] * factor[c & 1];
            }
        }
        // A block's first row, and its last, may go on in another block.
        const int place = 2 * blockIdx.x + (row_begin > begin);
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int of = 2 * (lane & 3) + i;
            if (of >= query_heads) continue;
            const float divisor = whole ? __fdividef(1.0f, state.sum[i]) : 1.0f;
            #pragma unroll
            for (int j = 0; j < VSTEPS; ++j) {
                const int channel = 32 * j + 4 * (lane >> 2);
                if (channel >= D) continue;
                const float v[4] = {state.out[2 * j][i] * divisor, state.out[2 * j][2 + i] * divisor,
                                    state.out[2 * j + 1][i] * divisor, state.out[2 * j + 1][2 + i] * divisor};
                if (whole)
                    *reinterpret_cast<uint2*>(out + (row * static_cast<long long>(HEADS * RATIO) + first_query + of) * D +
                                              channel) = make_uint2(T::pack(v[0], v[1]), T::pack(v[2], v[3]));
                else
                    *reinterpret_cast<float4*>(partial + (place * (HEADS * RATIO) + first_query + of) * D + channel) =
                        make_float4(v[0], v[1], v[2], v[3]);
            }
            if (!whole && (lane >> 2) == 0)
                *reinterpret_cast<float2*>(partial_stats + (place * (HEADS * RATIO) + first_query + of) * 2) =
                    make_float2(state.most[i], state.sum[i]);
        }
    }
}
