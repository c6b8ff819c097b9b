// x -> q8_1 as the CPU encodes it, bit for bit: d = absmax / 127, q = x * (1 / d) rounded half away from zero, s = d *
// sum(q) with the unrounded d. In weights d and s are halves; in activations they have the 11 bits of a half at any
// exponent, in ACTIVATION_UNIT: qgemm/codec/q8_1_f32.py.
//
// A NaN makes d and s NaN; codes that are not finite become 0.
#pragma once

#include "activations.cuh"

namespace qgemm {

// |x| as bits, which compare like integers; NaN is above all numbers.
__device__ inline u32 magnitude_bits(float value) { return __float_as_uint(value) & 0x7fffffff; }

// Rounded to 11 bits, to nearest even, as __float2half_rn rounds to normal halves; NaN and infinity become NaN.
// Veltkamp's splitting in three instructions, tested with every significand.
__device__ inline float to_half_precision(float value) {
    const float above = __fmul_rn(value, 0x1p13f + 1);
    return __fadd_rn(above, __fadd_rn(value, -above));
}

struct Quantizer {
    float d, inverse;

    // largest: the largest magnitude_bits of a block. An infinite 1 / d has no finite product, so it may be 0.
    __device__ Quantizer(u32 largest) : d(__fdiv_rn(__uint_as_float(largest), 127.0f)), inverse(__frcp_rn(d)) {
        if (isinf(inverse)) inverse = 0;
    }
    // Adding the float below 1/2 and truncating rounds half away from zero, tested with every magnitude below 256. NaN
    // is truncated to 0.
    __device__ int code(float value) const {
        const float scaled = __fmul_rn(value, inverse);
        return __float2int_rz(__fadd_rn(scaled, copysignf(0x1.fffffep-2f, scaled)));
    }
    // The s of a block of weights.
    __device__ half half_sum(int sum) const { return __float2half_rn(__fmul_rn(d, float(sum))); }
    // The d of a block of activations, in ACTIVATION_UNIT.
    __device__ float scale() const { return to_half_precision(unrounded()); }
    __device__ float sum(int sum) const { return to_half_precision(__fmul_rn(unrounded(), float(sum))); }

private:
    __device__ float unrounded() const { return __fmul_rn(d, 1 / ACTIVATION_UNIT); }
};

// The largest magnitude_bits of a block, whose four lanes are neighbours.
__device__ inline u32 largest_of_block(const float (&values)[8]) {
    u32 largest = 0;
    for (float value : values) largest = max(largest, magnitude_bits(value));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    return max(largest, __shfl_xor_sync(~0u, largest, 2));
}

// The codes of a lane's eight values, which are a quarter of a block. All lanes of a warp take part.
struct QuantizedShare {
    Quantizer quantizer;
    u32 q[2];  // columns 0..3, 4..7

    __device__ explicit QuantizedShare(const float (&values)[8]) : quantizer(largest_of_block(values)) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 codes[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) codes[j] = quantizer.code(values[4 * i + j]);
            q[i] = __byte_perm(__byte_perm(codes[0], codes[1], 0x40), __byte_perm(codes[2], codes[3], 0x40), 0x5410);
        }
    }
    // Stores this share, number `lane` of the token's shares in a k_block; stores nothing where `inside` is false.
    __device__ void store(Activations& to, int lane, bool inside = true) const {
        int sum = __dp4a(int(q[1]), 0x01010101, __dp4a(int(q[0]), 0x01010101, 0));
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        // Two neighbours hold the halves of a step: the first stores the words of t = 0 and 1, the second t = 2 and 3.
        const int odd = lane % 2, step = lane / 2 % 2, block = lane / 4;
        const u32 other = __shfl_xor_sync(~0u, odd ? q[0] : q[1], 1);
        if (!inside) return;
        const u32 near = odd ? other : q[0], far = odd ? q[1] : other;
        u32* words = reinterpret_cast<u32*>(to.q + 32 * block + 16 * odd + 4 * step);
        words[0] = __byte_perm(near, far, 0x5140);
        words[2] = __byte_perm(near, far, 0x7362);
        if (lane % 4 == 0) to.ds[block] = {quantizer.scale(), quantizer.sum(sum)};
    }
    // The value of code i.
    __device__ float value(int i) const {
        return ACTIVATION_UNIT * quantizer.scale() * float(int(q[i / 4] << 8 * (3 - i % 4)) >> 24);
    }
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

// The value, or the largest finite number of the type with its sign where a finite value lies beyond: 127 times a
// rounded scale may exceed the largest x.
__device__ inline float within(float value, float) { return value; }
__device__ inline float within(float value, half) {
    return fabsf(value) > 65504.0f && isfinite(value) ? copysignf(65504.0f, value) : value;
}

template <class T>
__device__ inline void store_eight(T* to, const float (&values)[8]) {
    alignas(16) T rounded[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) rounded[i] = from_float<T>(within(values[i], T()));
#pragma unroll
    for (int i = 0; i < 8 * int(sizeof(T)) / 16; ++i)
        reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(rounded)[i];
}

}  // namespace qgemm
