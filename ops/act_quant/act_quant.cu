// Dynamic int8 quantisation of activation rows, alone or fused with what produces the row.
//
//   quant_per_token             y = x
//   rms_norm_quant              y = w * (x / sqrt(mean(x^2) + eps))
//   fused_add_rms_norm_quant    the same of s = x + residual (fp32); residual_out = s
//   silu_mul_quant              y = silu(gate) * up
//   all                         a = max(max|y|, AMAX_FLOOR)    scale = a / 127    q = round_half_even(y * (127 / a))
//
// y is rounded to the dtype wherever `cpu.py` rounds it. One block per row. With VECTORS > 0 the row stays in registers,
// VECTORS times 8 elements per thread, and memory is read once; with VECTORS = 0 (rows too wide for that) it is read
// again for each step.
//
// Compile-time: DTYPE 0 bf16, 1 fp16; VECTORS 0, 1, 2, 4; ALIGNED 1: every row of every tensor starts at a multiple of
// 16 bytes and K is a multiple of 8, so that a thread moves 8 neighbours at once; 0: neighbouring threads move
// neighbouring elements one by one. Launch: grid T, block a multiple of 32 up to MAX_THREADS.

#include "row.cuh"

// The norm's weight is read beside the row where there are registers for it, so that its latency is the row's;
// otherwise after the reduction.
constexpr bool WEIGHT_EARLY = VECTORS == 1;

__device__ __forceinline__ Eight early_weight(const unsigned short* weight, Place at, int K) {
    return WEIGHT_EARLY ? load(weight, at, K) : zeros();
}

__device__ __forceinline__ Eight late_weight(const Eight& early, const unsigned short* weight, Place at, int K) {
    return WEIGHT_EARLY ? early : load(weight, at, K);
}

// What is quantised. For each place of a row: `read` what is needed of it, `keep` what the operator also returns, add up
// `squares` for the norm, and give the `result` y. Nothing is written between reads, which may then all be under way.
struct Quant {
    static constexpr bool NORM = false;
    using Held = Eight;
    const unsigned short* x;
    int K;

    __device__ __forceinline__ Held read(Place at) const { return load(x, at, K); }
    __device__ __forceinline__ void keep(Place, const Held&) const {}
    __device__ __forceinline__ float squares(const Held&) const { return 0.0f; }
    __device__ __forceinline__ Eight result(const Held& held, Place, float) const { return held; }
};

struct RmsNorm {
    static constexpr bool NORM = true;
    struct Held {
        Eight x, weight;
    };
    const unsigned short* x;
    const unsigned short* weight;
    float eps;
    int K;

    __device__ __forceinline__ Held read(Place at) const { return {load(x, at, K), early_weight(weight, at, K)}; }
    __device__ __forceinline__ void keep(Place, const Held&) const {}
    __device__ __forceinline__ float squares(const Held& held) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 v = T::unpack(held.x.word[i]);
            sum = fmaf(v.y, v.y, fmaf(v.x, v.x, sum));
        }
        return sum;
    }
    __device__ __forceinline__ Eight result(const Held& held, Place at, float factor) const {
        const Eight w = late_weight(held.weight, weight, at, K);
        Eight y;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 v = T::unpack(held.x.word[i]);
            y.word[i] = T::mul(T::pack(v.x * factor, v.y * factor), w.word[i]);
        }
        return y;
    }
};

struct AddRmsNorm {
    static constexpr bool NORM = true;
    struct Held {
        float value[8];
        Eight weight;
    };
    const unsigned short* x;
    const unsigned short* residual;
    const unsigned short* weight;
    unsigned short* residual_out;
    float eps;
    int K;

    __device__ __forceinline__ Held read(Place at) const {
        const Eight a = load(x, at, K), b = load(residual, at, K);
        Held held;
        held.weight = early_weight(weight, at, K);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 u = T::unpack(a.word[i]), v = T::unpack(b.word[i]);
            held.value[2 * i] = u.x + v.x;
            held.value[2 * i + 1] = u.y + v.y;
        }
        return held;
    }
    __device__ __forceinline__ void keep(Place at, const Held& held) const {
        Eight sum;
#pragma unroll
        for (int i = 0; i < 4; ++i) sum.word[i] = T::pack(held.value[2 * i], held.value[2 * i + 1]);
        store(residual_out, at, K, sum);
    }
    __device__ __forceinline__ float squares(const Held& held) const {
        float sum = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; ++e) sum = fmaf(held.value[e], held.value[e], sum);
        return sum;
    }
    __device__ __forceinline__ Eight result(const Held& held, Place at, float factor) const {
        const Eight w = late_weight(held.weight, weight, at, K);
        Eight y;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            y.word[i] = T::mul(T::pack(held.value[2 * i] * factor, held.value[2 * i + 1] * factor), w.word[i]);
        return y;
    }
};

struct SiluMul {
    static constexpr bool NORM = false;
    using Held = Eight;
    const unsigned short* gate;
    const unsigned short* up;
    int K;

    // v / (1 + 2^(-v log2 e)) by the hardware's approximations, each good to the last two bits of fp32; 1 + inf gives 0.
    static __device__ __forceinline__ float silu(float v) {
        float power, inverse;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v * -1.442695041f));
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
        return v * inverse;
    }

    __device__ __forceinline__ Held read(Place at) const {
        const Eight g = load(gate, at, K), u = load(up, at, K);
        Eight y;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 v = T::unpack(g.word[i]);
            y.word[i] = T::mul(T::pack(silu(v.x), silu(v.y)), u.word[i]);
        }
        return y;
    }
    __device__ __forceinline__ void keep(Place, const Held&) const {}
    __device__ __forceinline__ float squares(const Held&) const { return 0.0f; }
    __device__ __forceinline__ Eight result(const Held& held, Place, float) const { return held; }
};

template <class Op>
__device__ __forceinline__ float norm_factor(const Op& op, float squares) {
    if constexpr (Op::NORM)
        return __fdiv_rn(1.0f, __fsqrt_rn(__fdiv_rn(block_sum(squares), static_cast<float>(op.K)) + op.eps));
    else
        return 1.0f;
}

template <class Op>
__device__ __forceinline__ void run(const Op& op, signed char* q, float* scale) {
    float squares = 0.0f;
    AbsMax amax;
#if VECTORS > 0
    typename Op::Held held[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        held[v] = op.read(place(v));
        squares += op.squares(held[v]);
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) op.keep(place(v), held[v]);
    const float factor = norm_factor(op, squares);
    Eight y[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        y[v] = op.result(held[v], place(v), factor);
        amax.take(y[v]);
    }
    const Quantiser quantiser(amax.of_block(), scale);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) quantiser.write(q, place(v), op.K, y[v]);
#else
    const int rounds = (op.K + 8 * static_cast<int>(blockDim.x) - 1) / (8 * static_cast<int>(blockDim.x));
    if constexpr (Op::NORM) {
        for (int v = 0; v < rounds; ++v) {
            const auto held = op.read(place(v));
            squares += op.squares(held);
            op.keep(place(v), held);
        }
    }
    const float factor = norm_factor(op, squares);
    for (int v = 0; v < rounds; ++v) amax.take(op.result(op.read(place(v)), place(v), factor));
    const Quantiser quantiser(amax.of_block(), scale);
    for (int v = 0; v < rounds; ++v)
        quantiser.write(q, place(v), op.K, op.result(op.read(place(v)), place(v), factor));
#endif
}

// K elements a row; strides in elements; q [T, K] without gaps, scale [T].

extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    quant_per_token(const unsigned short* x, long long stride, int K, signed char* q, float* scale) {
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const long long row = blockIdx.x;
    run(Quant{x + row * stride, K}, q + row * K, scale + row);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    rms_norm_quant(const unsigned short* x, long long stride, const unsigned short* weight, float eps, int K,
                   signed char* q, float* scale) {
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const long long row = blockIdx.x;
    run(RmsNorm{x + row * stride, weight, eps, K}, q + row * K, scale + row);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    fused_add_rms_norm_quant(const unsigned short* x, long long stride, const unsigned short* residual,
                             long long residual_stride, const unsigned short* weight, float eps, int K, signed char* q,
                             float* scale, unsigned short* residual_out) {
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const long long row = blockIdx.x;
    run(AddRmsNorm{x + row * stride, residual + row * residual_stride, weight, residual_out + row * K, eps, K},
        q + row * K, scale + row);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS)
    silu_mul_quant(const unsigned short* gate_up, long long stride, int K, signed char* q, float* scale) {
    numeric::wait_for_previous();
    numeric::launch_dependents();
    const long long row = blockIdx.x;
    const unsigned short* gate = gate_up + row * stride;
    run(SiluMul{gate, gate + K, K}, q + row * K, scale + row);
}
