// The tokens that each KV head keeps, of up to 16 layers: selection.py, one block for each head and layer.
//
// A stage takes chunks from the best down, of equal ones the latest first, until the next would exceed its room. The first
// that does not fit is found by its key, eight bits at a time: of the chunks that agree with the bits found so far, a
// histogram of their tokens by the next eight. Keys order as numbers do, 0 and -0 are one, and NaN is above everything.
//
// Per evictable token: kept, 0 or 1 (2: as 1, within the chunk that is being cut). Per chunk: its key and its free tokens.
//
// Up to three stages, of which the last takes what is left. Grid: x KV heads, y layers.

#include "numeric.cuh"

constexpr int THREADS = 1024, WARPS = 32, BINS = 256;

__device__ __forceinline__ unsigned key_of(float x) {
    if (x != x) return ~0u;
    const unsigned bits = x == 0.0f ? 0u : __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Sum of `value` over the threads up to this one; `total`: over all.
__device__ __forceinline__ int scan(int value, int& total) {
    __shared__ int warp_sums[WARPS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    #pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const int other = __shfl_up_sync(~0u, value, apart);
        if (lane >= apart) value += other;
    }
    if (lane == 31) warp_sums[warp] = value;
    __syncthreads();
    total = 0;
    for (int w = 0; w < WARPS; ++w) {
        if (w == warp) value += total;
        total += warp_sums[w];
    }
    __syncthreads();
    return value;
}

struct Head {
    const float* scores;  // of the evictable tokens
    int tokens, chunk, chunks;
    unsigned char* kept;
    unsigned* keys;
    int* sizes;
};

// Key and free tokens of each chunk: the sum of the free ones' scores, first to last, or the greatest.
__device__ void rank_chunks(const Head& h, bool sum) {
    for (int c = threadIdx.x; c < h.chunks; c += THREADS) {
        float total = 0.0f;
        unsigned key = 0;
        int size = 0;
        for (int t = c * h.chunk; t < min(h.tokens, c * h.chunk + h.chunk); ++t) {
            if (h.kept[t]) continue;
            const float score = __ldg(h.scores + t);
            total = __fadd_rn(total, score);
            key = max(key, key_of(score));
            ++size;
        }
        h.keys[c] = sum ? key_of(total) : key;
        h.sizes[c] = size;
    }
}

// The key of the first chunk that does not fit into `left` tokens, and in `left` what chunks of better keys leave; false,
// and `left` as it was, if all fit.
__device__ bool threshold(const Head& h, unsigned& key, int& left) {
    __shared__ int tokens_of[BINS];
    __shared__ int found_bin, found_left;
    const int lane = threadIdx.x & 31;
    unsigned agreed = 0;
    key = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (threadIdx.x < BINS) tokens_of[threadIdx.x] = 0;
        if (threadIdx.x == 0) found_bin = -1;
        __syncthreads();
        for (int c = threadIdx.x; c < h.chunks; c += THREADS) {
            const int size = h.sizes[c];
            if (size == 0 || (h.keys[c] & agreed) != key) continue;
            // One addition for all lanes of a bin: keys of like scores share their first bits.
            const unsigned bin = h.keys[c] >> shift & 255u, peers = __match_any_sync(__activemask(), bin);
            const int sum = static_cast<int>(__reduce_add_sync(peers, static_cast<unsigned>(size)));
            if (lane == __ffs(peers) - 1) atomicAdd(&tokens_of[bin], sum);
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            int mine[BINS / 32], sum = 0;
            #pragma unroll
            for (int i = 0; i < BINS / 32; ++i) sum += mine[i] = tokens_of[BINS - 1 - lane * (BINS / 32) - i];
            int before = sum;
            #pragma unroll
            for (int apart = 1; apart < 32; apart *= 2) {
                const int other = __shfl_up_sync(~0u, before, apart);
                if (lane >= apart) before += other;
            }
            before -= sum;
            if (before <= left && before + sum > left) {
                #pragma unroll
                for (int i = 0; i < BINS / 32; ++i) {
                    if (before <= left && before + mine[i] > left)
                        found_bin = BINS - 1 - lane * (BINS / 32) - i, found_left = left - before;
                    before += mine[i];
                }
            }
        }
        __syncthreads();
        if (found_bin < 0) return false;
        key |= static_cast<unsigned>(found_bin) << shift;
        agreed |= 255u << shift;
        left = found_left;
        __syncthreads();
    }
    return true;
}

// Keep what one stage takes of `room` tokens, whole chunks alone unless `last`, and return how many those are.
__device__ int take(const Head& h, int room, bool last) {
    __shared__ int cut, cut_room;
    unsigned key;
    int left = room;
    const bool all = !threshold(h, key, left);
    if (threadIdx.x == 0) cut = -1, cut_room = 0;
    __syncthreads();
    int before = 0, taken = 0;
    for (int base = 0; base < h.chunks; base += THREADS) {
        const int c = h.chunks - 1 - base - static_cast<int>(threadIdx.x);
        const int size = c >= 0 ? h.sizes[c] : 0;
        const unsigned of = c >= 0 ? h.keys[c] : 0u;
        const bool equal = !all && size > 0 && of == key;
        int of_equals, of_taken;
        const int end = before + scan(equal ? size : 0, of_equals);
        const bool whole = size > 0 && (all || of > key || (equal && end <= left));
        if (equal && end - size <= left && end > left) cut = c, cut_room = left - (end - size);
        if (whole)
            for (int t = c * h.chunk; t < min(h.tokens, c * h.chunk + h.chunk); ++t) h.kept[t] = 1;
        scan(whole ? size : 0, of_taken);
        before += of_equals, taken += of_taken;
    }
    __syncthreads();
    if (!last || cut < 0) return taken;
    // The best free tokens of the chunk that does not fit as a whole. What is 0 becomes 2: both are free.
    const int begin = cut * h.chunk, end = min(h.tokens, begin + h.chunk);
    for (int t = begin + static_cast<int>(threadIdx.x); t < end; t += THREADS) {
        if (h.kept[t] == 1) continue;
        const unsigned mine = key_of(__ldg(h.scores + t));
        int better = 0;
        for (int u = begin; u < end; ++u) {
            const unsigned other = key_of(__ldg(h.scores + u));
            better += h.kept[u] != 1 && (other > mine || (other == mine && u > t));
        }
        if (better < cut_room) h.kept[t] = 2;
    }
    __syncthreads();
    return taken + cut_room;
}

#define LAYERS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)
#define PARAMETERS(i) const float *scores##i, int *out##i,
#define PICK(i) if (blockIdx.y == i) scores = scores##i, out = out##i;

extern "C" __global__ void __launch_bounds__(THREADS)
    prune_select(LAYERS(PARAMETERS) int stages, int length, int sink, int window, int keep, int room0,
                 int chunk0, int sum0, int room1, int chunk1, int sum1, int chunk2, int sum2, unsigned char* kept,
                 int kept_pitch, unsigned* keys, int* sizes, int pitch) {
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const float* scores = scores0;
    int* out = out0;
    LAYERS(PICK)
    const long long head = blockIdx.y * gridDim.x + blockIdx.x;  // of those of all layers
    Head h;
    h.tokens = length - window - sink;
    h.kept = kept + head * kept_pitch, h.keys = keys + head * pitch, h.sizes = sizes + head * pitch;
    for (int i = threadIdx.x; i < kept_pitch / 4; i += THREADS) reinterpret_cast<unsigned*>(h.kept)[i] = 0u;
    int left = keep - sink - window;
    for (int stage = 0; stage < stages; ++stage) {
        const bool last = stage == stages - 1;
        const int sum = stage == 0 ? sum0 : stage == 1 ? sum1 : sum2;
        h.chunk = stage == 0 ? chunk0 : stage == 1 ? chunk1 : chunk2;
        h.chunks = (h.tokens + h.chunk - 1) / h.chunk;
        h.scores = scores + (static_cast<long long>(stage) * gridDim.x + blockIdx.x) * length + sink;
        __syncthreads();
        rank_chunks(h, sum);
        __syncthreads();
        left -= take(h, last ? left : stage == 0 ? room0 : room1, last);
    }
    int* const to = out + blockIdx.x * static_cast<long long>(keep);
    for (int i = threadIdx.x; i < sink; i += THREADS) to[i] = i;
    for (int i = threadIdx.x; i < window; i += THREADS) to[keep - window + i] = length - window + i;
    int place = sink;
    for (int base = 0; base < kept_pitch / 4; base += THREADS) {
        const int word = base + static_cast<int>(threadIdx.x);
        const unsigned flags = word < kept_pitch / 4 ? reinterpret_cast<const unsigned*>(h.kept)[word] : 0u;
        const unsigned set = (flags | flags >> 1) & 0x01010101u;
        int total;
        int at = place + scan(__popc(set), total) - __popc(set);
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            if (set >> (8 * i) & 1u) to[at++] = sink + 4 * word + i;
        place += total;
    }
}
