// What all layers of a step share: where each row's tiles begin in the line (line.cuh), and which pages are skipped.
//
//   first_page[r] = pages of block 0, the null block, in front of row r's first real page
//   offsets[r]    = sum over rows before r of ceil((seq_lens[r] - first_page[r] * BS) / TILE), rows + 1 of them
//
// One block of 1024 threads. Defines: BS, tokens of a page.

#include "line.cuh"
#include "numeric.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    kv8_plan(const int* __restrict__ block_table, int table_pitch, const int* __restrict__ seq_lens, int rows,
             int* __restrict__ offsets, int* __restrict__ first_page) {
    __shared__ int warp_sums[32];
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int before = 0;
    for (int base = 0; base < rows; base += 1024) {
        const int row = base + threadIdx.x;
        int count = 0;
        if (row < rows) {
            const int length = seq_lens[row], pages = (length + BS - 1) / BS;
            const int* const table = block_table + static_cast<long long>(row) * table_pitch;
            int low = 0, high = pages;  // the first page that is none of the null block's lies in low..high
            while (low < high) {
                const int middle = (low + high) / 2;
                if (table[middle] == 0) low = middle + 1;
                else high = middle;
            }
            first_page[row] = low;
            count = (length - low * BS + TILE - 1) / TILE;
            count = max(count, 0);
        }
        int sum = count;
        #pragma unroll
        for (int apart = 1; apart < 32; apart *= 2) {
            const int other = __shfl_up_sync(~0u, sum, apart);
            if (lane >= apart) sum += other;
        }
        if (lane == 31) warp_sums[warp] = sum;
        __syncthreads();
        int others = 0, all = 0;
        for (int w = 0; w < 32; ++w) {
            if (w < warp) others += warp_sums[w];
            all += warp_sums[w];
        }
        if (row < rows) offsets[row] = before + others + sum - count;
        before += all;
        __syncthreads();
    }
    if (threadIdx.x == 0) offsets[rows] = before;
}
