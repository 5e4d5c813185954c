// Move the kept tokens of up to 16 layers to the last positions of a request, in place: op_move.prune_compact.
//
// keep[g, j] goes to position first + j, from the last down. keep ascends, so keep[g, j] <= first + j: no tile's sources
// lie where one before it has written, and a tile's targets lie behind the sources of those after it. So each tile is
// loaded before the one before it is stored, and stored when all threads have loaded it. A block has a head's keys, or its
// values: 12 words a thread and tile, whose places in the cache are found two tiles ahead.
//
// Defines: D. Grid: x KV heads, y keys and values, z layers.

#include "numeric.cuh"

constexpr int THREADS = 256, WORDS = D / 4 + 1, EACH = 12;
constexpr int TILE = THREADS * EACH / WORDS;  // tokens
static_assert(TILE <= THREADS, "");

#define LAYERS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)
#define PARAMETERS(i) signed char *cache##i, long long page_bytes##i, const int *keep##i,
#define PICK(i) if (blockIdx.z == i) cache = cache##i, page_bytes = page_bytes##i, keep = keep##i;

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    prune_compact(LAYERS(PARAMETERS) const int* __restrict__ table, int block_size, int kept, int first) {
    // Four tiles' places: being found, loaded from, stored to, and still stored to by some threads.
    __shared__ long long from[4][TILE], to[4][TILE];
    numeric::wait_for_previous();
    numeric::launch_dependents();
    signed char* cache = cache0;
    long long page_bytes = page_bytes0;
    const int* keep = keep0;
    LAYERS(PICK)
    keep += blockIdx.x * static_cast<long long>(kept);
    const auto place = [&](int position) {
        const long long slot = blockIdx.y * block_size + position % block_size;
        return table[position / block_size] * page_bytes + (slot * gridDim.x + blockIdx.x) * (D + 4);
    };
    // Tile i has tokens kept - (i + 1) * TILE and on.
    const auto find = [&](int tile) {
        const int token = kept - (tile + 1) * TILE + static_cast<int>(threadIdx.x);
        if (threadIdx.x < TILE && token >= 0) {
            from[tile % 4][threadIdx.x] = place(keep[token]);
            to[tile % 4][threadIdx.x] = place(first + token);
        }
    };
    const auto load = [&](unsigned (&words)[EACH], int tile) {
        const int token0 = kept - (tile + 1) * TILE;
        #pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int item = i * THREADS + static_cast<int>(threadIdx.x), token = item / WORDS;
            words[i] = 0u;
            if (token < TILE && token0 + token >= 0)
                words[i] = *reinterpret_cast<const unsigned*>(cache + from[tile % 4][token] + item % WORDS * 4);
        }
    };
    find(0);
    find(1);
    __syncthreads();
    unsigned words[EACH], next[EACH];
    load(words, 0);
    const int tiles = (kept + TILE - 1) / TILE;
    for (int tile = 0; tile < tiles; ++tile) {
        const int token0 = kept - (tile + 1) * TILE;
        load(next, tile + 1);
        find(tile + 2);
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int item = i * THREADS + static_cast<int>(threadIdx.x), token = item / WORDS;
            if (token < TILE && token0 + token >= 0)
                *reinterpret_cast<unsigned*>(cache + to[tile % 4][token] + item % WORDS * 4) = words[i];
            words[i] = next[i];
        }
    }
}
