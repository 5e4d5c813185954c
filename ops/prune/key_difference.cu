// How unlike its head's other keys each key is (KeyDiff). The scale of an int8 vector cancels.
//
//   sums[split, g, :]  = sum over the split's tokens of k8[t] / |k8[t]|
//   scores[g, t]       = - <k8[t] / |k8[t]|, m / |m|>,    m = sum over splits; 0 for a vector of zeros
//
// A warp for each 8 neighbouring tokens, which lie in one page. Defines: those of observe.cuh. Grid: x splits, y KV heads.

#include "observe.cuh"

constexpr int PARTS = (D / 4 + 31) / 32;  // words of a vector for a lane
constexpr int GROUP = 8;                  // tokens

// Sums over all lanes: lane l gets that of x[l / 4].
template <class Number> __device__ __forceinline__ Number over_lanes(Number (&x)[GROUP]) {
    const int lane = threadIdx.x & 31;
    #pragma unroll
    for (int apart = 16, left = GROUP / 2; left > 0; apart /= 2, left /= 2) {
        const bool upper = lane & apart;
        #pragma unroll
        for (int i = 0; i < GROUP / 2; ++i) {
            if (i >= left) continue;
            const Number theirs = __shfl_xor_sync(~0u, upper ? x[i] : x[left + i], apart);
            x[i] = (upper ? x[left + i] : x[i]) + theirs;
        }
    }
    Number sum = x[0] + __shfl_xor_sync(~0u, x[0], 2);
    return sum + __shfl_xor_sync(~0u, sum, 1);
}

// Of 8 tokens the words that this lane has, zeros for those past the request's end.
struct Keys {
    int words[GROUP][PARTS];

    __device__ __forceinline__ void load(const Request& r, int begin) {
        const int lane = threadIdx.x & 31;
        const signed char* const from = r.vector(begin, KEYS);
        #pragma unroll
        for (int k = 0; k < GROUP; ++k)
            #pragma unroll
            for (int i = 0; i < PARTS; ++i) {
                const int at = i * 32 + lane;
                const long long apart = static_cast<long long>(k) * gridDim.y * (D + 4);
                words[k][i] = 0;
                if (at < D / 4 && begin + k < r.length) words[k][i] = *reinterpret_cast<const int*>(from + apart + 4 * at);
            }
    }
    __device__ __forceinline__ float value(int k, int i, int c) const {
        return static_cast<float>(static_cast<signed char>(words[k][i] >> (8 * c)));
    }
    // 1 / |k8| of key l / 4, 0 for a vector of zeros.
    __device__ __forceinline__ float inverse_norm() const {
        int squares[GROUP];
        #pragma unroll
        for (int k = 0; k < GROUP; ++k) {
            squares[k] = 0;
            #pragma unroll
            for (int i = 0; i < PARTS; ++i) squares[k] = __dp4a(words[k][i], words[k][i], squares[k]);
        }
        const int sum = over_lanes(squares);
        return sum == 0 ? 0.0f : rsqrtf(static_cast<float>(sum));
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    prune_key_sum(REQUEST_PARAMETERS, float* __restrict__ sums) {
    __shared__ float of_warp[WARPS][PARTS * 128];
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const Request r = REQUEST;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, groups = (length + GROUP - 1) / GROUP;
    const int end = split_begin(blockIdx.x + 1, groups);
    float sum[PARTS][4] = {};
    #pragma unroll 2
    for (int group = split_begin(blockIdx.x, groups) + warp; group < end; group += WARPS) {
        Keys keys;
        keys.load(r, group * GROUP);
        const float inverse_norm = keys.inverse_norm();
        #pragma unroll
        for (int k = 0; k < GROUP; ++k) {
            const float of_key = __shfl_sync(~0u, inverse_norm, 4 * k);
            #pragma unroll
            for (int i = 0; i < PARTS; ++i)
                #pragma unroll
                for (int c = 0; c < 4; ++c) sum[i][c] += keys.value(k, i, c) * of_key;
        }
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

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    prune_key_difference(REQUEST_PARAMETERS, int low, int high, const float* __restrict__ sums, int splits,
                         float* __restrict__ scores) {
    __shared__ float mean[PARTS * 128];
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const Request r = REQUEST;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, groups = (length + GROUP - 1) / GROUP;
    for (int channel = threadIdx.x; channel < PARTS * 128; channel += THREADS) {
        float all = 0.0f;
        if (channel < D)
            #pragma unroll 8
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
    const int end = split_begin(blockIdx.x + 1, groups);
    #pragma unroll 2
    for (int group = split_begin(blockIdx.x, groups) + warp; group < end; group += WARPS) {
        Keys keys;
        keys.load(r, group * GROUP);
        float products[GROUP];
        #pragma unroll
        for (int k = 0; k < GROUP; ++k) {
            products[k] = 0.0f;
            #pragma unroll
            for (int i = 0; i < PARTS; ++i)
                #pragma unroll
                for (int c = 0; c < 4; ++c) products[k] += keys.value(k, i, c) * of_lane[i][c];
        }
        const float score = -over_lanes(products) * keys.inverse_norm() * norm;
        const int t = group * GROUP + lane / 4;
        if (lane % 4 == 0 && t < length)
            scores[static_cast<long long>(blockIdx.y) * length + t] = t >= low && t < high ? score : 0.0f;
    }
}
