// Copy the kept tokens of one request and layer from one cache into another: op_move.prune_copy. A warp for each kept
// token, KV head and half.
//
// Defines: D. Grid: x warps / 8.

#include "numeric.cuh"

constexpr int WARPS = 8, WORDS = D / 4 + 1;

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    prune_copy(const signed char* __restrict__ source, long long source_bytes, const int* __restrict__ source_table,
               int source_block, signed char* __restrict__ target, long long target_bytes,
               const int* __restrict__ target_table, int target_block, const int* __restrict__ keep, int heads, int kept,
               int first) {
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const int lane = threadIdx.x & 31;
    const long long item = static_cast<long long>(blockIdx.x) * WARPS + (threadIdx.x >> 5);
    const int half = item & 1, head = (item >> 1) % heads, token = static_cast<int>((item >> 1) / heads);
    if (token >= kept) return;
    const auto place = [&](int position, const int* table, int block_size, long long bytes) {
        const long long slot = half * block_size + position % block_size;
        return table[position / block_size] * bytes + (slot * heads + head) * (D + 4);
    };
    const int position = keep[head * static_cast<long long>(kept) + token];
    const unsigned* const from =
        reinterpret_cast<const unsigned*>(source + place(position, source_table, source_block, source_bytes));
    unsigned* const to =
        reinterpret_cast<unsigned*>(target + place(first + token, target_table, target_block, target_bytes));
    for (int word = lane; word < WORDS; word += 32) to[word] = from[word];
}
