// How unlike its head's other keys each key is (KeyDiff). The scale of an int8 vector cancels.
//
//   sums[split, g, :]  = sum over the split's tokens of k8[t] / |k8[t]|
//   scores[g, t]       = - <k8[t] / |k8[t]|, m / |m|>,    m = sum over splits; 0 for a vector of zeros
//
// A warp for each token. Defines: those of observe.cuh. Grid: x splits, y KV heads.

#include "observe.cuh"

constexpr int PARTS = (D / 4 + 31) / 32;  // words of a vector for a lane

struct Key {
    float x[PARTS][4];
    float inverse_norm;

    __device__ __forceinline__ void load(const Request& r, int position) {
        const int lane = threadIdx.x & 31;
        const signed char* const from = r.vector(position, KEYS);
        int squares = 0;
        #pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const int at = i * 32 + lane, word = at < D / 4 ? *reinterpret_cast<const int*>(from + 4 * at) : 0;
            #pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int value = static_cast<signed char>(word >> (8 * c));
                x[i][c] = static_cast<float>(value), squares += value * value;
            }
        }
        #pragma unroll
        for (int apart = 1; apart < 32; apart *= 2) squares += __shfl_xor_sync(~0u, squares, apart);
        inverse_norm = squares == 0 ? 0.0f : __fdiv_rn(1.0f, __fsqrt_rn(static_cast<float>(squares)));
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prune_key_sum(REQUEST_PARAMETERS, float* __restrict__ sums) {
    __shared__ float of_warp[WARPS][PARTS * 128];
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const Request r = REQUEST;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int end = split_begin(blockIdx.x + 1, length);
    float sum[PARTS][4] = {};
    #pragma unroll 2
    for (int t = split_begin(blockIdx.x, length) + warp; t < end; t += WARPS) {
        Key key;
        key.load(r, t);
        #pragma unroll
        for (int i = 0; i < PARTS; ++i)
            #pragma unroll
            for (int c = 0; c < 4; ++c) sum[i][c] += key.x[i][c] * key.inverse_norm;
    }
    #pragma unroll
    for (int i = 0; i < PARTS; ++i)
        #pragma unroll
        for (int c = 0; c < 4; ++c) of_warp[warp][(i * 32 + lane) * 4 + c] = sum[i][c];
    __syncthreads();
    for (int channel = threadIdx.x; channel < D; channel += THREADS) {
        float all = 0.0f;
        for (int w = 0; w < WARPS; ++w) all += of_warp[w][channel];
        sums[(static_cast<long long>(blockIdx.x) * gridDim.y + blockIdx.y) * D + channel] = all;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prune_key_difference(REQUEST_PARAMETERS, int low, int high, const float* __restrict__ sums, int splits,
                         float* __restrict__ scores) {
    __shared__ float mean[PARTS * 128];
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const Request r = REQUEST;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int channel = threadIdx.x; channel < PARTS * 128; channel += THREADS) {
        float all = 0.0f;
        if (channel < D)
            for (int split = 0; split < splits; ++split)
                all += sums[(static_cast<long long>(split) * gridDim.y + blockIdx.y) * D + channel];
        mean[channel] = all;
    }
    __syncthreads();
    float of_lane[PARTS][4], norm = 0.0f;
    #pragma unroll
    for (int i = 0; i < PARTS; ++i)
        #pragma unroll
        for (int c = 0; c < 4; ++c) {
            of_lane[i][c] = mean[(i * 32 + lane) * 4 + c];
            norm += of_lane[i][c] * of_lane[i][c];
        }
    #pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) norm += __shfl_xor_sync(~0u, norm, apart);
    norm = __fdiv_rn(1.0f, fmaxf(__fsqrt_rn(norm), 1e-12f));
    const int end = low + split_begin(blockIdx.x + 1, high - low);
    #pragma unroll 2
    for (int t = low + split_begin(blockIdx.x, high - low) + warp; t < end; t += WARPS) {
        Key key;
        key.load(r, t);
        float product = 0.0f;
        #pragma unroll
        for (int i = 0; i < PARTS; ++i)
            #pragma unroll
            for (int c = 0; c < 4; ++c) product += key.x[i][c] * of_lane[i][c];
        #pragma unroll
        for (int apart = 1; apart < 32; apart *= 2) product += __shfl_xor_sync(~0u, product, apart);
        if (lane == 0) scores[static_cast<long long>(blockIdx.y) * length + t] = -product * key.inverse_norm * norm;
    }
}
