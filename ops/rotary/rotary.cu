// Rotary embedding of queries and keys, a thread for WIDTH pairs of a head: elements i and i + D / 2 are a pair.
//
//   out[i] = round(x[i] * cos[i] - x[i + D/2] * sin[i])    out[i + D/2] = round(x[i + D/2] * cos[i] + x[i] * sin[i])
//
// with cos = table[position][: D/2] and sin = table[position][D/2 :]. fp32, each operation rounded by itself.
//
// `settled`: the kernel before this on the stream writes neither positions nor table. Both are then read before it has
// ended; see decode.cu of ops/kv8 for why what wrote them has. Queries and keys are read after the wait in any case, and
// through pointers that are not __restrict__, or the compiler might read them earlier.
//
// Defines: D head size, DTYPE of all but positions (0 bf16, 1 fp16), WIDTH (8: D / 2, all addresses and pitches are
// multiples of 8 elements; 1: any).
// Grid: x tokens, y blocks that a token's heads, those of the query first, take.

#include "numeric.cuh"

#if DTYPE == 0
using T = numeric::Bf16;
#else
using T = numeric::Fp16;
#endif

constexpr int HALF = D / 2, PER_HEAD = HALF / WIDTH, THREADS = 256, WORDS = (WIDTH + 1) / 2;
static_assert(D % 2 == 0 && HALF % WIDTH == 0 && (WIDTH == 8 || WIDTH == 1), "");

struct Vector {
    unsigned word[WORDS];
};

#if WIDTH == 8
__device__ __forceinline__ Vector load(const unsigned short* from) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    return {{v.x, v.y, v.z, v.w}};
}
__device__ __forceinline__ void store(unsigned short* to, const Vector& x) {
    *reinterpret_cast<uint4*>(to) = make_uint4(x.word[0], x.word[1], x.word[2], x.word[3]);
}
#else
__device__ __forceinline__ Vector load(const unsigned short* from) { return {{*from}}; }
__device__ __forceinline__ void store(unsigned short* to, const Vector& x) { *to = numeric::low_half(x.word[0]); }
#endif

__device__ __forceinline__ float minus(float x, float cos, float y, float sin) {
    return __fsub_rn(__fmul_rn(x, cos), __fmul_rn(y, sin));
}

__device__ __forceinline__ float plus(float x, float cos, float y, float sin) {
    return __fadd_rn(__fmul_rn(x, cos), __fmul_rn(y, sin));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    rotary(const unsigned short* query, long long query_pitch, const unsigned short* key, long long key_pitch,
           const long long* positions, const unsigned short* table, unsigned short* query_out, unsigned short* key_out,
           int query_heads, int heads, int settled) {
    const int item = blockIdx.y * blockDim.x + threadIdx.x, head = item / PER_HEAD, first = item % PER_HEAD * WIDTH;
    const long long token = blockIdx.x;
    const bool is_key = head >= query_heads;
    const int of_its = is_key ? head - query_heads : head, its_heads = is_key ? heads - query_heads : query_heads;
    const unsigned short* const from =
        (is_key ? key + token * key_pitch : query + token * query_pitch) + of_its * D + first;
    unsigned short* const to = (is_key ? key_out : query_out) + (token * its_heads + of_its) * D + first;
    if (!settled) numeric::wait_for_previous();
    const unsigned short* const angles = table + positions[token] * D + first;
    const Vector cos = load(angles), sin = load(angles + HALF);
    numeric::wait_for_previous();
    numeric::launch_dependents();
    if (head >= heads) return;
    const Vector x = load(from), y = load(from + HALF);
    Vector low, high;
    #pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        const float2 c = T::unpack(cos.word[i]), s = T::unpack(sin.word[i]);
        const float2 a = T::unpack(x.word[i]), b = T::unpack(y.word[i]);
        low.word[i] = T::pack(minus(a.x, c.x, b.x, s.x), minus(a.y, c.y, b.y, s.y));
        high.word[i] = T::pack(plus(b.x, c.x, a.x, s.x), plus(b.y, c.y, a.y, s.y));
    }
    store(to, low);
    store(to + HALF, high);
}
