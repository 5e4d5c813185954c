// Copy pages of all layers between blocks of a device's KV cache and rows of a pool of pinned host memory, which the
// device addresses directly: cuda.BlockCopy. A warp for each page and layer.
//
//   row of a page:   | layer 0's bytes | layer 1's bytes | ...
//
// Beside each copy stands the checksum of what was read (checksum.py), of one page and layer in one word: no other warp
// adds to it, so nothing has to be cleared before. What a store reads is not read again: it need not stay in a cache.
//
// Grid: any x; 1 to layers * count / WARPS are of use.

constexpr int THREADS = 512, WARPS = THREADS / 32;
constexpr int VECTORS = 4;  // of 16 bytes, that a lane reads before it writes the first of them

// One row of the table of layers. Of a vector cache [blocks, bytes]: its address, bytes from one block to the next, where
// its part of a row begins in bytes, and its vectors a block.
struct Layer {
    long long address, pitch, offset, vectors;
};

// Finaliser of splitmix64, a bijection.
__device__ __forceinline__ unsigned long long mixed(unsigned long long word) {
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9ull;
    word = (word ^ (word >> 27)) * 0x94d049bb133111ebull;
    return word ^ (word >> 31);
}

// Of the vector that stands at place `at` of its row: its two words of 64 bits.
__device__ __forceinline__ unsigned long long checksum(uint4 vector, long long at) {
    constexpr unsigned long long STEP = 0x9e3779b97f4a7c15ull;
    const unsigned long long low = vector.x | static_cast<unsigned long long>(vector.y) << 32;
    const unsigned long long high = vector.z | static_cast<unsigned long long>(vector.w) << 32;
    const unsigned long long place = 2ull * static_cast<unsigned long long>(at);
    return mixed(low + (place + 1) * STEP) + mixed(high + (place + 2) * STEP);
}

template <bool STORE>
__device__ __forceinline__ void copy(const Layer* layers, int layer_count, const int* moves, unsigned long long* sums,
                                     unsigned char* rows, long long row_bytes, int begin, int count, int capacity) {
    const int lane = threadIdx.x & 31;
    const long long items = static_cast<long long>(count) * layer_count;
    const long long step = static_cast<long long>(gridDim.x) * WARPS;
    for (long long item = static_cast<long long>(blockIdx.x) * WARPS + (threadIdx.x >> 5); item < items; item += step) {
        const int number = static_cast<int>(item % layer_count);
        const long long at = (begin + item / layer_count) % capacity;
        const Layer layer = layers[number];
        uint4* const page = reinterpret_cast<uint4*>(layer.address + moves[2 * at] * layer.pitch);
        uint4* const row = reinterpret_cast<uint4*>(rows + moves[2 * at + 1] * row_bytes + layer.offset);
        const uint4* const from = STORE ? page : row;
        uint4* const to = STORE ? row : page;
        const long long first = layer.offset / 16;
        unsigned long long sum = 0;
        for (long long i = lane; i < layer.vectors; i += 32 * VECTORS) {
            uint4 held[VECTORS];
#pragma unroll
            for (int j = 0; j < VECTORS; ++j)
                if (i + 32 * j < layer.vectors) held[j] = __ldcs(from + i + 32 * j);
#pragma unroll
            for (int j = 0; j < VECTORS; ++j)
                if (i + 32 * j < layer.vectors) {
                    __stcs(to + i + 32 * j, held[j]);
                    sum += checksum(held[j], first + i + 32 * j);
                }
        }
#pragma unroll
        for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
        if (lane == 0) sums[at * layer_count + number] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    block_copy_store(const void* layers, int layer_count, const int* moves, unsigned long long* sums, unsigned char* rows,
                     long long row_bytes, int begin, int count, int capacity) {
    copy<true>(static_cast<const Layer*>(layers), layer_count, moves, sums, rows, row_bytes, begin, count, capacity);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    block_copy_load(const void* layers, int layer_count, const int* moves, unsigned long long* sums, unsigned char* rows,
                    long long row_bytes, int begin, int count, int capacity) {
    copy<false>(static_cast<const Layer*>(layers), layer_count, moves, sums, rows, row_bytes, begin, count, capacity);
}
