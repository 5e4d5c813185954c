// fp16 products of int8 data, which fp16 holds exactly, on tensor cores, and what their operands are made with.

#pragma once

// Bytes 0 and 1 (or 2 and 3) of int8 plus 128 as two fp16 numbers of the int8 values.
template <int SELECT> __device__ __forceinline__ unsigned widen(unsigned bytes) {
    unsigned both;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(both) : "r"(bytes), "n"(0x64646464), "n"(SELECT));
    asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(both) : "r"(0x64806480));  // 1024 + 128
    return both;
}
constexpr int LOW = 0x4140, HIGH = 0x4342;
constexpr unsigned FLIP = 0x80808080u;  // int8 to int8 plus 128

// d += a b: a of 16 rows by 16, b of 16 by 8 columns; lane l has rows l / 4 (and 8 more) and columns 2 (l % 4), + 1 of d.
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ unsigned pack_f16(float low, float high) {
    unsigned both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// 2^-e where 2^e <= greatest < 2^(e + 1), from the exponent's bits; 1 for zeros, what is nearly so, and infinities.
__device__ __forceinline__ float inverse_power_below(float greatest) {
    const unsigned bits = __float_as_uint(greatest) & 0x7f800000u;
    return bits > 0x08000000u && bits < 0x76000000u ? __uint_as_float(0x7f000000u - bits) : 1.0f;
}
