// Bring a span of each row's context out of the int8 cache (layout.py) into a workspace, in the dtype that flash attention
// takes. A warp for each token and KV head, keys and values.
//
// Workspace tokens starts[i] to starts[i + 1] are positions begins[i] and on of row i of the block table. The grid is for the
// most tokens there can be, `room`; what starts[rows] leaves over ends at once, but for TAIL values of zeros.
//
// Flash attention masks scores, not values: what it reads of values behind a row's last token is multiplied by a weight
// of 0, which a NaN would survive. So values are finite there, and a token with a vector that is not finite has a NaN as
// its key, by which it reaches the rows that attend to it, and zeros as its value.
//
// Defines: D head size, DTYPE of the workspace (0 bf16, 1 fp16), BS tokens of a page.

#include "numeric.cuh"

#if DTYPE == 0
using T = numeric::Bf16;
#else
using T = numeric::Fp16;
#endif

constexpr int WIDTH = D + 4, WORDS = (D / 4 + 31) / 32, WARPS = 8;
constexpr int TAIL = 256;  // no fewer tokens than a tile of flash attention has

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    kv8_dequantise(const signed char* __restrict__ cache, long long page_bytes, const int* __restrict__ block_table,
                   int table_pitch, const int* __restrict__ starts, const int* __restrict__ begins, int rows, int heads,
                   int room, unsigned short* __restrict__ keys, unsigned short* __restrict__ values) {
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const int lane = threadIdx.x & 31, item = blockIdx.x * WARPS + (threadIdx.x >> 5);
    const int head = item % heads, token = item / heads;
    const int tokens = starts[rows];
    const long long at = (static_cast<long long>(token) * heads + head) * D;
    if (token >= tokens) {
        const int end = min(tokens + TAIL, room);  // the last block has warps beyond the workspace
        for (int word = lane; token < end && word < D / 4; word += 32)
            *reinterpret_cast<uint2*>(values + at + word * 4) = make_uint2(0, 0);
        return;
    }
    int low = 0, high = rows;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (starts[middle] <= token) low = middle;
        else high = middle;
    }
    const int position = begins[low] + token - starts[low];
    const int page = block_table[static_cast<long long>(low) * table_pitch + position / BS];
    const signed char* const key = cache + page * page_bytes + (position % BS * static_cast<long long>(heads) + head) * WIDTH;
    const signed char* const value = key + BS * static_cast<long long>(heads) * WIDTH;
    const float key_scale = *reinterpret_cast<const float*>(key + D), value_scale = *reinterpret_cast<const float*>(value + D);
    const float infinity = __int_as_float(0x7f800000);
    const bool finite = fabsf(key_scale) < infinity && fabsf(value_scale) < infinity;
    #pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        const int word = i * 32 + lane;
        if (word >= D / 4) continue;
        const char4 k = *reinterpret_cast<const char4*>(key + word * 4), v = *reinterpret_cast<const char4*>(value + word * 4);
        const float ks = finite ? key_scale : __int_as_float(0x7fc00000), vs = finite ? value_scale : 0.0f;
        *reinterpret_cast<uint2*>(keys + at + word * 4) = make_uint2(T::pack(k.x * ks, k.y * ks), T::pack(k.z * ks, k.w * ks));
        *reinterpret_cast<uint2*>(values + at + word * 4) = make_uint2(T::pack(v.x * vs, v.y * vs), T::pack(v.z * vs, v.w * vs));
    }
}
