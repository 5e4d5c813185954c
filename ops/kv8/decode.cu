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
// `settled`: the kernel before this on the stream writes nothing that is read here but q and, of a row's pages, its last
// two. Whatever else is read is then read before that kernel has ended, STAGES tiles of the block included. It is complete: as
// any kernel here, the one before waits for its own predecessors (griddepcontrol.wait, or a launch that is not
// programmatic) before it lets this one start (launch_dependents, or its end), so that all of them have ended by now and
// what they wrote can be seen; that only this one kernel is still running needs no more of the kernels further back.
// A row's newest token is in its last page; one page more is left for a store of two tokens a row. It does not hold where
// rows share pages: vLLM counts a block as cached once its last token is scheduled, so that a row may have found a page,
// anywhere in front of pages that were cached before, which another row fills in this very step.
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
    kv8_decode(const unsigned short* q, long long q_pitch, const signed char* __restrict__ cache, long long page_bytes,
               const int* __restrict__ block_table, int table_pitch, const int* __restrict__ seq_lens,
               const int* offsets, const int* first_page, int rows, float scale, unsigned short* __restrict__ out,
               float* __restrict__ partial, float* __restrict__ partial_stats, int settled) {
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
    if (!settled) numeric::wait_for_previous();
    const int looked_at = plan.look(), tiles = plan.tiles();
    const int pieces = min(static_cast<int>(gridDim.x), tiles);  // so that none is empty
    const bool idle = blockIdx.x >= pieces;
    const int begin = idle ? 0 : piece_begin(blockIdx.x, pieces, tiles);
    const int end = idle ? 0 : piece_begin(blockIdx.x + 1, pieces, tiles);
    int row = plan.row_of(begin, looked_at);  // and all have seen the barriers

    if (warp == WARPS) {
        // The producer: 32 page numbers at a time, then a copy of keys and one of values for each tile.
        int slot = 0;
        unsigned parity = 1;
        for (int base = begin; base < end; base += 32) {
            const int count = min(32, end - base), mine = base + min(lane, count - 1);
            int r = row;
            while (offsets[r + 1] <= mine) ++r;
            const int token = first_page[r] * BS + (mine - offsets[r]) * TILE;
            const int page = block_table[static_cast<long long>(r) * table_pitch + token / BS];
            const signed char* const from = cache + page * page_bytes + (token % BS * HEADS + group0) * WIDTH;
            const bool old = settled && token / BS + 2 <= (seq_lens[r] - 1) / BS;
            row = __shfl_sync(~0u, r, 31);
            const auto copy = [&](int i, int to) {
                const auto keys = __shfl_sync(~0u, reinterpret_cast<long long>(from), i);
                copy_tile(stages + to * STAGE_BYTES, reinterpret_cast<const signed char*>(keys), full + 8 * to);
            };
            // The first tiles, unless the kernel before this writes to them.
            const unsigned early = __ballot_sync(~0u, old && base == begin && lane < min(STAGES, count));
            for (int i = 0; i < STAGES; ++i)
                if (early >> i & 1) copy(i, i);
            numeric::wait_for_previous();
            for (int i = 0; i < count; ++i) {
                if (!(early >> i & 1)) {  // those may be in use, or even done with, by now
                    barrier_wait(empty + 8 * slot, parity);
                    copy(i, slot);
                }
                if (++slot == STAGES) slot = 0, parity ^= 1;
            }
        }
        numeric::wait_for_previous();  // where there were no tiles, too
        for (int r = blockIdx.x; r < rows; r += gridDim.x) {
            if (offsets[r] != offsets[r + 1]) continue;
            // A row without tokens gets zeros.
            uint2* const to = reinterpret_cast<uint2*>(out + (static_cast<long long>(r) * HEADS + group0) * RATIO * D);
            for (int i = lane; i < GROUP * RATIO * D / 4; i += 32) to[i] = make_uint2(0, 0);
        }
        copies_end();
        return;
    }
    numeric::wait_for_previous();
    numeric::launch_dependents();

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
