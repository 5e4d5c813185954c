// AnDPro's anchor, in parts, and the softmax's statistics of every observation row: of splits of the positions.
//
//   stats[split, g, chunk, row]      = (m, sum_t 2^(l[t] - m)),    l[t] = log2(e) scale q . k[t] for t that the row sees
//   units[split, g]                  = U, the power of two above the largest scale sv of an evictable value, t in [low, high)
//   partial[split, g, chunk, row, :] = sum_t pool(2^(l[t] - m))[t] v8[t] sv[t] / U * 2^UP      over evictable t
//
// m is at least the split's largest l. It grows from tile to tile, and what is summed so far is brought down, as in flash
// attention. Dividing by U keeps what is rounded to fp16 in its range, whatever the scales sv are. prune_anchor_sum puts
// the parts together. A tile overlaps its neighbours by REACH tokens on either side, which are theirs to sum.
//
// Defines: those of tile.cuh. Grid: x splits, y KV heads, z chunks. Shared memory: rows, a tile.

#include "tile.cuh"

constexpr int CHANNELS = D / 8;  // eights of them

// fp16 ones for a lane's pair of tokens, and zeros for those that are no more than neighbours to this tile.
__device__ __forceinline__ unsigned ones_within(int pair) {
    unsigned ones = 0u;
    #pragma unroll
    for (int c = 0; c < 2; ++c) {
        const int token = 2 * pair + c, quarter = thread_now() & 3;
        const bool beyond = (token < REACH && quarter == 0) || (token >= 2 * PAIRS - REACH && quarter == 3);
        ones |= beyond ? 0u : 0x3c00u << (16 * c);
    }
    return ones;
}

extern "C" __global__ void __launch_bounds__(THREADS, D > 128 || REACH > 8 ? 1 : 2)
    prune_anchor(REQUEST_PARAMETERS, int low, int high, float2* __restrict__ stats, float* __restrict__ units,
                 float* __restrict__ partial) {
    extern __shared__ __align__(16) unsigned shared[];
    __shared__ Rows rows;
    __shared__ __align__(16) float raw_scales[2 * TOKENS], key_scales[TOKENS], value_shares[TOKENS], warp_peaks[WARPS], over_unit;
    unsigned* const vectors = shared;
    const Tile tile(vectors + ROWS * HALF_PITCH, raw_scales);
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const Request r = REQUEST;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int tiles = (length + INNER - 1) / INNER;
    const int first = split_begin(blockIdx.x, tiles) * INNER, end = split_begin(blockIdx.x + 1, tiles) * INNER;
    const auto fetch = [&](int inner) { tile.fetch(r, inner - REACH, max(low, inner), min(high, inner + INNER)); };
    fetch(first);
    load_rows<HALF_PITCH>(vectors, rows, r);
    float value_peak = 0.0f;
    for (int t = max(low, first) + static_cast<int>(threadIdx.x); t < min(high, end); t += THREADS)
        value_peak = fmaxf(value_peak, *reinterpret_cast<const float*>(r.vector(t, VALUES) + D));
    #pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) value_peak = fmaxf(value_peak, __shfl_xor_sync(~0u, value_peak, apart));
    if (lane == 0) warp_peaks[warp] = value_peak;
    __syncthreads();
    if (threadIdx.x == 0) {
        #pragma unroll
        for (int i = 0; i < WARPS; ++i) value_peak = fmaxf(value_peak, warp_peaks[i]);
        over_unit = 0.5f * inverse_power_below(value_peak);
        if (blockIdx.z == 0) units[blockIdx.x * gridDim.y + blockIdx.y] = inverse_of_power(over_unit);
    }

    float anchor[CHANNELS][4], sum[4] = {0.0f, 0.0f, 0.0f, 0.0f}, most[2] = {LOWEST, LOWEST};
    #pragma unroll
    for (int n = 0; n < CHANNELS; ++n)
        #pragma unroll
        for (int c = 0; c < 4; ++c) anchor[n][c] = 0.0f;
    for (int inner = first; inner < end; inner += INNER) {
        copies_arrive();
        __syncthreads();
        Tile::widen_all(tile.keys, tile.raw_keys);
        if (!ONE_PLACE) Tile::widen_all(tile.values, tile.raw_values);
        if (threadIdx.x < TOKENS) {
            key_scales[threadIdx.x] = raw_scales[threadIdx.x];
            value_shares[threadIdx.x] = raw_scales[TOKENS + threadIdx.x] * over_unit;
        }
        __syncthreads();
        if (!ONE_PLACE && inner + INNER < end) fetch(inner + INNER);
        const int quarter = thread_now() & 3;
        unsigned weights[2][PAIRS];
        {
            float out[PAIRS][4];
            const unsigned* const own = fragments(vectors);
            multiply_rows<2>(out, tile.keys, [&](unsigned (&a)[4], int k) { load_matrices(a, own + 8 * k); });
            scale_and_mask(out, key_scales, r, inner - REACH, rows);
            const int row = thread_now() >> 5 << 4 | (thread_now() & 31) >> 2;
            const float factor[2] = {rows.factor[row], rows.factor[row + 8]};
            float greatest[2] = {LOWEST, LOWEST};
            #pragma unroll
            for (int j = 0; j < PAIRS; ++j)
                #pragma unroll
                for (int c = 0; c < 4; ++c) greatest[c / 2] = fmaxf(greatest[c / 2], out[j][c]);
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                greatest[c] = fmaxf(greatest[c], __shfl_xor_sync(~0u, greatest[c], 1));
                greatest[c] = fmaxf(greatest[c], __shfl_xor_sync(~0u, greatest[c], 2));
                greatest[c] = fmaxf(most[c], greatest[c] * factor[c]);
            }
            if (__any_sync(~0u, greatest[0] > most[0] || greatest[1] > most[1])) {
                const float down[2] = {exp2_fast(most[0] - greatest[0]), exp2_fast(most[1] - greatest[1])};
                #pragma unroll
                for (int n = 0; n < CHANNELS; ++n)
                    #pragma unroll
                    for (int c = 0; c < 4; ++c) anchor[n][c] *= down[c / 2];
                #pragma unroll
                for (int c = 0; c < 4; ++c) sum[c] *= down[c / 2];
                most[0] = greatest[0], most[1] = greatest[1];
            }
            #pragma unroll
            for (int j = 0; j < PAIRS; ++j) {
                #pragma unroll
                for (int c = 0; c < 4; ++c) out[j][c] = exp2_fast(fmaf(out[j][c], factor[c / 2], UP - most[c / 2]));
                weights[0][j] = pack_f16(out[j][0], out[j][1]), weights[1][j] = pack_f16(out[j][2], out[j][3]);
            }
        }
        // Weights times one, for tokens that no other tile sums: all columns of the product are the sum.
        #pragma unroll
        for (int k = 0; k < TOKENS / 16; ++k) {
            const unsigned a[4] = {weights[0][2 * k], weights[1][2 * k], weights[0][2 * k + 1], weights[1][2 * k + 1]};
            mma(sum, a, ones_within(2 * k), ones_within(2 * k + 1));
        }
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            pool(weights[c]);
            #pragma unroll
            for (int j = 0; j < PAIRS; ++j) {
                const float2 share = *reinterpret_cast<const float2*>(value_shares + 16 * quarter + 2 * j);
                const float2 pooled = numeric::Fp16::unpack(weights[c][j]);
                weights[c][j] = pack_f16(pooled.x * share.x, pooled.y * share.y);
            }
        }
        if (ONE_PLACE) {
            __syncthreads();
            Tile::widen_all(tile.values, tile.raw_values);
            __syncthreads();
            if (inner + INNER < end) fetch(inner + INNER);
        }
        const unsigned* const values = tile.values + matrix_row();
        #pragma unroll
        for (int k = 0; k < TOKENS / 16; ++k) {
            const unsigned a[4] = {weights[0][2 * k], weights[1][2 * k], weights[0][2 * k + 1], weights[1][2 * k + 1]};
            #pragma unroll
            for (int n = 0; n < CHANNELS; n += 2) {
                unsigned b[4];
                load_transposed(b, values + 4 * k * HALF_PITCH + 4 * n);
                mma(anchor[n], a, b[0], b[1]);
                mma(anchor[n + 1], a, b[2], b[3]);
            }
        }
    }
    const long long at = (static_cast<long long>(blockIdx.x) * gridDim.y + blockIdx.y) * gridDim.z + blockIdx.z;
    const int quarter = lane & 3;
    #pragma unroll
    for (int c = 0; c < 2; ++c) {
        const long long row = at * ROWS + 16 * warp + lane / 4 + 8 * c;
        if (quarter == 0) stats[row] = make_float2(most[c], sum[2 * c] * DOWN);
        #pragma unroll
        for (int n = 0; n < CHANNELS; ++n)
            *reinterpret_cast<float2*>(partial + row * D + 8 * n + 2 * quarter) =
                make_float2(anchor[n][2 * c], anchor[n][2 * c + 1]);
    }
}
