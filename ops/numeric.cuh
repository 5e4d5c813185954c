// bf16 and fp16 without the headers of a CUDA toolkit: values travel as the bits of one (unsigned short) or two packed
// (unsigned, element 0 in the low half), arithmetic is fp32 or the packed instructions of sm_80 and later.
//
//   using T = numeric::Bf16;                                   // or numeric::Fp16: the same interface
//   float2 v = T::unpack(word);  word = T::pack(v.x, v.y);     // pack rounds to nearest even
//   word = T::mul(a, b);                                       // rounded once, subnormals kept
//   word = T::abs_max(a, b);                                   // larger magnitude per half; NaN wins

#pragma once

namespace numeric {

__device__ __forceinline__ unsigned short low_half(unsigned word) { return static_cast<unsigned short>(word & 0xffffu); }
__device__ __forceinline__ unsigned short high_half(unsigned word) { return static_cast<unsigned short>(word >> 16); }

struct Bf16 {
    static __device__ __forceinline__ float to_float(unsigned short bits) {
        return __uint_as_float(static_cast<unsigned>(bits) << 16);
    }
    static __device__ __forceinline__ unsigned short from_float(float value) {
        unsigned short bits;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        return bits;
    }
    static __device__ __forceinline__ float2 unpack(unsigned word) {
        return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
    }
    static __device__ __forceinline__ unsigned pack(float low, float high) {
        unsigned word;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
        return word;
    }
    static __device__ __forceinline__ unsigned mul(unsigned a, unsigned b) {
        unsigned word;
        // mul.bf16x2 needs sm_90. Adding -0 leaves every product as it is, +0 included.
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(word) : "r"(a), "r"(b), "r"(0x80008000u));
        return word;
    }
    static __device__ __forceinline__ unsigned abs_max(unsigned a, unsigned b) {
        unsigned word;
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a & 0x7fff7fffu), "r"(b & 0x7fff7fffu));
        return word;
    }
};

struct Fp16 {
    static __device__ __forceinline__ float to_float(unsigned short bits) {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
    static __device__ __forceinline__ unsigned short from_float(float value) {
        unsigned short bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        return bits;
    }
    static __device__ __forceinline__ float2 unpack(unsigned word) {
        return make_float2(to_float(low_half(word)), to_float(high_half(word)));
    }
    static __device__ __forceinline__ unsigned pack(float low, float high) {
        unsigned word;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
        return word;
    }
    static __device__ __forceinline__ unsigned mul(unsigned a, unsigned b) {
        unsigned word;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
        return word;
    }
    static __device__ __forceinline__ unsigned abs_max(unsigned a, unsigned b) {
        unsigned word;
        asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a & 0x7fff7fffu), "r"(b & 0x7fff7fffu));
        return word;
    }
};

// Programmatic dependent launch; nothing below sm_90.
// Lets the next kernel of the stream start its blocks once all of ours have said so or ended. Called after the wait, so
// that whatever ran before this kernel has ended, and is visible, to what the next one reads before its own wait.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Returns when the kernels before this one have ended and what they wrote can be read. The compiler may move loads through
// `const __restrict__` pointers to before it, above all where it is called under a condition: tests/ops/test_waits.py
// looks at the machine code.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace numeric
