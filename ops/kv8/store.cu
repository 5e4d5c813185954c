// Quantise keys and values and write them into their slots of the int8 cache (layout.py): a warp for each token, KV head
// and half.
//
//   scale = max(max|x| / 127, SCALE_FLOOR)    data = round_half_even(x / scale)
//
// A vector that is not finite gets a scale of NaN, and zeros.
//
// Defines: D head size, DTYPE of key and value (0 bf16, 1 fp16), BS tokens of a page.

#include "numeric.cuh"

#if DTYPE == 0
using T = numeric::Bf16;
#else
using T = numeric::Fp16;
#endif

constexpr int WIDTH = D + 4, WORDS = (D / 4 + 31) / 32, WARPS = 8;
constexpr float SCALE_FLOOR = 1e-20f;

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    kv8_store(const unsigned short* __restrict__ key, const unsigned short* __restrict__ value, long long key_pitch,
              long long value_pitch, long long key_head_pitch, long long value_head_pitch,
              const long long* __restrict__ slots, int tokens, int heads, signed char* __restrict__ cache,
              long long page_bytes) {
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const int lane = threadIdx.x & 31, item = blockIdx.x * WARPS + (threadIdx.x >> 5);
    const int half = item & 1, head = (item >> 1) % heads, token = (item >> 1) / heads;
    if (token >= tokens) return;
    const long long slot = slots[token];
    const unsigned short* const from = half ? value + token * value_pitch + head * value_head_pitch
                                            : key + token * key_pitch + head * key_head_pitch;
    float x[WORDS][4], most = 0.0f;
    bool finite = true;
    #pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        const int word = i * 32 + lane;
        uint2 raw = make_uint2(0, 0);
        if (word < D / 4) raw = *reinterpret_cast<const uint2*>(from + word * 4);
        const float2 a = T::unpack(raw.x), b = T::unpack(raw.y);
        x[i][0] = a.x, x[i][1] = a.y, x[i][2] = b.x, x[i][3] = b.y;
        #pragma unroll
        for (int c = 0; c < 4; ++c) {
            most = fmaxf(most, fabsf(x[i][c]));
            finite = finite && fabsf(x[i][c]) < __int_as_float(0x7f800000);
        }
    }
    most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));
    finite = __all_sync(~0u, finite);
    if (slot < 0) return;  // known no sooner than the vector, which is read at the same time
    const float scale = finite ? fmaxf(__fdiv_rn(most, 127.0f), SCALE_FLOOR) : __int_as_float(0x7fc00000);
    signed char* const to =
        cache + slot / BS * page_bytes + ((half * BS + slot % BS) * static_cast<long long>(heads) + head) * WIDTH;
    #pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        const int word = i * 32 + lane;
        if (word >= D / 4) continue;
        unsigned packed = 0;
        #pragma unroll
        for (int c = 0; c < 4; ++c)
            if (finite) packed |= (__float2int_rn(__fdiv_rn(x[i][c], scale)) & 255u) << (8 * c);
        *reinterpret_cast<unsigned*>(to + word * 4) = packed;
    }
    if (lane == 0) *reinterpret_cast<float*>(to + D) = scale;
}
