// AnDPro's scores of the evictable positions [low, high), summed over the rows of a chunk; 0 for the other positions.
//
//   scores[chunk, g, t] = sum over rows of A'[row, t] <Y[row], v[t]>,    A'[row, t] = pool(2^(l[t] - peak))[t] / sum
//
// And, if asked for, what the last query of each head attends to: last[h, t] = A[h, W - 1, t], or A' with `pool_last`.
//
// Weights are computed as in prune_anchor; products with anchors as those with queries, in the same lanes. The queries
// stay in registers, and the anchors take their place in shared memory.
//
// Defines: those of tile.cuh. Grid: x splits, y KV heads, z chunks. Shared memory: rows, a tile.

#include "tile.cuh"

// Sums over the lanes of a warp that have the same tokens: lane l gets those of tokens 16 (l % 4) + 2 (l / 4) and one more.
__device__ __forceinline__ float2 over_rows(float (&x)[2 * PAIRS]) {
    const int lane = thread_now() & 31;
    #pragma unroll
    for (int apart = 16, left = PAIRS; apart >= 4; apart /= 2, left /= 2) {
        const bool upper = lane & apart;
        #pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            if (i >= left) continue;
            const float theirs = __shfl_xor_sync(~0u, upper ? x[i] : x[left + i], apart);
            x[i] = (upper ? x[left + i] : x[i]) + theirs;
        }
    }
    return make_float2(x[0], x[1]);
}

// What last queries attend to, positions [inner, until) of a tile: `weight(c, token)` of a lane's two rows and 16 tokens.
template <class Weight>
__device__ __forceinline__ void put_last(float* last, const int* heads, const float4* facts, int inner, int until,
                                         int length, Weight weight) {
    const int row = (thread_now() >> 5) * 16 + (thread_now() & 31) / 4, begin = inner - REACH + 16 * (thread_now() & 3);
    #pragma unroll
    for (int c = 0; c < 2; ++c) {
        const int head = heads[row + 8 * c];
        if (head < 0) continue;
        const float factor = DOWN * facts[row + 8 * c].y;
        #pragma unroll
        for (int token = 0; token < 2 * PAIRS; ++token)
            if (begin + token >= inner && begin + token < until)
                last[static_cast<long long>(head) * length + begin + token] = weight(c, token) * factor;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, D > 128 || REACH > 8 ? 1 : 2)
    prune_score(REQUEST_PARAMETERS, int low, int high, const unsigned* __restrict__ anchors,
                const float4* __restrict__ facts, float* __restrict__ scores, float* __restrict__ last,
                int pool_last) {
    extern __shared__ __align__(16) unsigned shared[];
    __shared__ Rows rows;
    __shared__ __align__(16) float raw_scales[2 * TOKENS], key_scales[TOKENS], value_scales[TOKENS];
    __shared__ __align__(8) float sums[WARPS][TOKENS];
    __shared__ int last_heads[ROWS];  // the query head whose last query a row is, or -1
    unsigned* const vectors = shared;
    const Tile tile(vectors + ROWS * HALF_PITCH, raw_scales);
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const Request r = REQUEST;
    const long long chunk = static_cast<long long>(blockIdx.y) * gridDim.z + blockIdx.z;
    facts += chunk * ROWS;
    float* const of_head = scores + (static_cast<long long>(blockIdx.z) * gridDim.y + blockIdx.y) * length;
    const int tiles = (high - low + INNER - 1) / INNER;
    const int first = low + split_begin(blockIdx.x, tiles) * INNER;
    const int end = low + split_begin(blockIdx.x + 1, tiles) * INNER;
    const auto fetch = [&](int inner) { tile.fetch(r, inner - REACH, inner, min(inner + INNER, high)); };
    fetch(first);
    load_rows<HALF_PITCH>(vectors, rows, r);
    for (int row = threadIdx.x; row < ROWS; row += THREADS) {
        const int2 place = r.place(row);
        const bool is_last = last != nullptr && place.x >= 0 && place.y == window - 1;
        last_heads[row] = is_last ? static_cast<int>(blockIdx.y) * ratio + place.x : -1;
    }
    if (blockIdx.x == 0)
        for (int t = threadIdx.x; t < low + length - high; t += THREADS) of_head[t < low ? t : t - low + high] = 0.0f;
    __syncthreads();
    unsigned queries[KSTEPS][4];
    #pragma unroll
    for (int k = 0; k < KSTEPS; ++k) load_matrices(queries[k], fragments(vectors) + 8 * k);
    float factor[2], bias[2], anchor_factor[2];
    #pragma unroll
    for (int c = 0; c < 2; ++c) {
        const int row = (threadIdx.x >> 5) * 16 + (threadIdx.x & 31) / 4 + 8 * c;
        const float4 of_row = facts[row];
        const bool there = rows.sees[row] >= 0;  // else no weight, whatever the products with zeros are
        factor[c] = rows.factor[row], bias[c] = there ? UP - of_row.x : LOWEST;
        anchor_factor[c] = there ? of_row.z : 0.0f;
    }
    __syncthreads();
    #pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * (D / 8); i += THREADS)
        *reinterpret_cast<uint4*>(vectors + i / (D / 8) * HALF_PITCH + i % (D / 8) * 4) =
            reinterpret_cast<const uint4*>(anchors)[chunk * ROWS * (D / 8) + i];
    const auto put = [&](int inner) {  // the sums of a tile, all of which are there
        const int token = thread_now(), position = inner - REACH + token;
        if (token >= TOKENS || position < inner || position >= min(inner + INNER, high)) return;
        float sum = 0.0f;
        #pragma unroll
        for (int i = 0; i < WARPS; ++i) sum += sums[i][token];
        of_head[position] = sum * value_scales[token];
    };
    for (int inner = first; inner < end; inner += INNER) {
        copies_arrive();
        __syncthreads();
        if (inner != first) put(inner - INNER);
        Tile::widen_all(tile.keys, tile.raw_keys);
        if (!ONE_PLACE) Tile::widen_all(tile.values, tile.raw_values);
        if (threadIdx.x < TOKENS) {
            key_scales[threadIdx.x] = raw_scales[threadIdx.x];
            value_scales[threadIdx.x] = raw_scales[TOKENS + threadIdx.x];
        }
        __syncthreads();
        if (!ONE_PLACE && inner + INNER < end) fetch(inner + INNER);
        unsigned weights[2][PAIRS];
        float out[PAIRS][4];
        multiply_rows<KSTEPS>(out, tile.keys, [&](unsigned (&a)[4], int k) {
            #pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = queries[k][i];
        });
        scale_and_mask(out, key_scales, r, inner - REACH, rows);
        #pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            #pragma unroll
            for (int c = 0; c < 4; ++c) out[j][c] = exp2_fast(fmaf(out[j][c], factor[c / 2], bias[c / 2]));
            weights[0][j] = pack_f16(out[j][0], out[j][1]), weights[1][j] = pack_f16(out[j][2], out[j][3]);
        }
        if (last != nullptr && !pool_last)
            put_last(last, last_heads, facts, inner, min(inner + INNER, high), length, [&](int c, int token) { return out[token / 2][2 * c + token % 2]; });
        pool(weights[0]);
        pool(weights[1]);
        if (last != nullptr && pool_last)
            put_last(last, last_heads, facts, inner, min(inner + INNER, high), length, [&](int c, int token) {
                const float2 pooled = numeric::Fp16::unpack(weights[c][token / 2]);
                return token % 2 ? pooled.y : pooled.x;
            });
        if (ONE_PLACE) {
            __syncthreads();
            Tile::widen_all(tile.values, tile.raw_values);
            __syncthreads();
            if (inner + INNER < end) fetch(inner + INNER);
        }
        const unsigned* const own = fragments(vectors);
        multiply_rows<2>(out, tile.values, [&](unsigned (&a)[4], int k) { load_matrices(a, own + 8 * k); });
        float of_token[2 * PAIRS];
        #pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            const float2 a = numeric::Fp16::unpack(weights[0][j]), b = numeric::Fp16::unpack(weights[1][j]);
            of_token[2 * j] = a.x * (out[j][0] * anchor_factor[0]) + b.x * (out[j][2] * anchor_factor[1]);
            of_token[2 * j + 1] = a.y * (out[j][1] * anchor_factor[0]) + b.y * (out[j][3] * anchor_factor[1]);
        }
        const float2 sum = over_rows(of_token);
        const int lane = thread_now() & 31;
        *reinterpret_cast<float2*>(&sums[thread_now() >> 5][16 * (lane & 3) + lane / 4 * 2]) = sum;
    }
    __syncthreads();
    if (first < end) put(end - INNER);
}
