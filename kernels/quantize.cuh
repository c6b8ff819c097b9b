// x -> q8_1 as the CPU encodes it, bit for bit: d = absmax / 127, q = x * (1 / d) rounded half away from zero,
// s = d * sum(q) with the unrounded d.
//
// NaN anywhere makes d and s NaN; codes that are not finite become 0.
#pragma once

#include "activations.cuh"

// |x|, or NaN: the largest of some numbers, and NaN if one of them is. As bits they compare like integers.
__device__ inline u32 magnitude_bits(float value) { return __float_as_uint(value) & 0x7fffffff; }

struct Quantizer {
    float d, inverse;

    // Of the largest magnitude_bits of a block.
    __device__ Quantizer(u32 largest)
        : d(__fdiv_rn(__uint_as_float(largest), 127.0f)), inverse(d == 0 ? 0.0f : __frcp_rn(d)) {}
    __device__ int code(float value) const {
        const float scaled = __fmul_rn(value, inverse);
        return isfinite(scaled) ? int(roundf(scaled)) : 0;
    }
    __device__ half2 scale_and_sum(int sum) const { return __floats2half2_rn(d, __fmul_rn(d, float(sum))); }
};

// Eight numbers of any type, aligned to 16 bytes.
template <class T>
__device__ inline void load_eight(float (&to)[8], const T* from) {
    constexpr int N = 16 / sizeof(T);  // a load
#pragma unroll
    for (int i = 0; i < 8; i += N) {
        const uint4 bits = *reinterpret_cast<const uint4*>(from + i);
#pragma unroll
        for (int j = 0; j < N; ++j) to[i + j] = to_float(reinterpret_cast<const T*>(&bits)[j]);
    }
}
