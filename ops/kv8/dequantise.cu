// Bring a span of each row's context out of the int8 cache (layout.py) into a workspace, in the dtype that flash attention
// takes. A warp for each token and KV head, keys and values.
//
// Workspace tokens starts[i] to starts[i + 1] are positions begins[i] and on of row i of the block table. The grid is for the
// most tokens there can be; what starts[rows] leaves over ends at once.
//
// Defines: D head size, DTYPE of the workspace (0 bf16, 1 fp16), BS tokens of a page.

#include "numeric.cuh"

#if DTYPE == 0
using T = numeric::Bf16;
#else
using T = numeric::Fp16;
#endif

constexpr int WIDTH = D + 4, WORDS = (D / 4 + 31) / 32, WARPS = 8;

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    kv8_dequantise(const signed char* __restrict__ cache, long long page_bytes, const int* __restrict__ block_table,
                   int table_pitch, const int* __restrict__ starts, const int* __restrict__ begins, int rows, int heads,
                   unsigned short* __restrict__ keys, unsigned short* __restrict__ values) {
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const int lane = threadIdx.x & 31, item = blockIdx.x * WARPS + (threadIdx.x >> 5);
    const int head = item % heads, token = item / heads;
    if (token >= starts[rows]) return;
    int low = 0, high = rows;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (starts[middle] <= token) low = middle;
        else high = middle;
    }
    const int position = begins[low] + token - starts[low];
    const int page = block_table[static_cast<long long>(low) * table_pitch + position / BS];
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const signed char* const from =
            cache + page * page_bytes + ((half * BS + position % BS) * static_cast<long long>(heads) + head) * WIDTH;
        const float scale = *reinterpret_cast<const float*>(from + D);
        unsigned short* const to = (half ? values : keys) + (static_cast<long long>(token) * heads + head) * D;
        #pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const int word = i * 32 + lane;
            if (word >= D / 4) continue;
            const char4 x = *reinterpret_cast<const char4*>(from + word * 4);
            *reinterpret_cast<uint2*>(to + word * 4) =
                make_uint2(T::pack(x.x * scale, x.y * scale), T::pack(x.z * scale, x.w * scale));
        }
    }
}
