// Operands of the mma in a16.cuh by the type of x: x as operand B, codes of W as operand A of the same type. A product
// with a constant subtracts the code of level 0.
//
// half   Codes without conversion, as halves times 2^-CODE_EXPONENT.
// bf16   Bf16Codes, or levels where a format has none. Integers of 2^-133 leave the range of float, so that x is
//        multiplied by 2^X_EXPONENT (XRange in a16.cuh). SUM_FACTOR brings sums of x to where floats split into bf16.
// float  Levels in bf16, exact; x is a sum of three bf16 terms of 8 bits each.
#pragma once

#include "ptx/shared_address.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"

namespace qgemm {

template <class Format, class In>
struct Operand;

template <class Format>
struct Operand<Format, half> {
    using Type = half;
    static constexpr int TERMS = 1, X_EXPONENT = 0;
    static constexpr float SUM_FACTOR = 1;
    static constexpr int ZERO = Format::CODE_BIAS, EXPONENT = Format::CODE_EXPONENT, SHIFT = Format::HIGH_ROW_SHIFT;
    template <class Codes>
    static __device__ Fragment weights(const Codes& codes, int step) {
        return Format::codes_f16(codes, step);
    }
    static __device__ Fragment constant(int code) {
        if constexpr (!Format::CODES_ARE_LEVELS) return constant_f16(code << (24 - EXPONENT), SHIFT);
        const half2 level = __float2half2_rn(code * two_to(-EXPONENT));
        return {level, level, level, level};
    }
};

template <class Format>
struct Operand<Format, bf16> {
    using Type = bf16;
    using Integers = Bf16Codes<Format>;
    static constexpr int TERMS = 1, X_EXPONENT = Integers::EXPONENT == BF16_INTEGERS ? 96 : 0;
    static constexpr int ZERO = Integers::BIAS, EXPONENT = Integers::EXPONENT - X_EXPONENT, SHIFT = Integers::SHIFT;
    static constexpr float SUM_FACTOR = X_EXPONENT ? 0x1p64f : 1;
    template <class Codes>
    static __device__ Fragment weights(const Codes& codes, int step) {
        if constexpr (Integers::EXPONENT != 0) return Integers::fragment(codes, step);
        return bf16_levels<Format>(codes, step);
    }
    static __device__ Fragment constant(int code) {
        if constexpr (X_EXPONENT != 0) return constant_f16(code, SHIFT);
        const half2 pair = as_half2(bits_of(__float2bfloat162_rn(code * two_to(-EXPONENT))));
        return {pair, pair, pair, pair};
    }
};

template <class Format>
struct Operand<Format, float> {
    using Type = bf16;
    static constexpr int TERMS = 3, X_EXPONENT = 0, ZERO = 0, EXPONENT = 0, SHIFT = 0;
    static constexpr float SUM_FACTOR = 1;
    template <class Codes>
    static __device__ Fragment weights(const Codes& codes, int step) {
        return bf16_levels<Format>(codes, step);
    }
    static __device__ Fragment constant(int) {  // 1
        const half2 ones = as_half2(0x3f803f80);
        return {ones, ones, ones, ones};
    }
};

// A lane's share of operand B for one step and eight tokens: token g, columns (2t, 2t + 1) and (2t + 8, 2t + 9).
template <int TERMS>
using XStep = u32[TERMS][2];

// Splits the upper 8 bits of two floats off as bf16 and leaves the remainders in v: both are exact.
__device__ inline u32 take_bf16(float2& v) {
    const u32 x = __float_as_uint(v.x), y = __float_as_uint(v.y);
    v.x -= __uint_as_float(x & 0xffff0000), v.y -= __uint_as_float(y & 0xffff0000);
    return __byte_perm(x, y, 0x7632);
}

// A lane's codes of a k_block: `owned` if the lane owns columns 4t to 4t + 3 (OWNS_COLUMNS), otherwise `codes`.
template <class Format, class KBlock>
__device__ inline auto decode_codes(const KBlock& k_block, int m16, int lane) {
    if constexpr (Format::OWNS_COLUMNS)
        return k_block.owned(m16, lane);
    else
        return k_block.codes(m16, lane);
}

// Operand B of two steps and eight tokens, whose rows in shared memory start at `rows`, `stride` numbers apart.
// OWNED: columns 4t to 4t + 3 instead of 2t, 2t + 1, 2t + 8, 2t + 9.
template <bool OWNED, class In>
__device__ inline void load_x_steps(XStep<1> (&b)[2], const In* rows, int stride, int lane) {
    if constexpr (OWNED) {
#pragma unroll
        for (int step = 0; step < 2; ++step)
            load_words<2>(b[step][0],
                          reinterpret_cast<const u32*>(rows + lane / 4 * stride + 16 * step + lane % 4 * 4));
    } else {
        u32 columns[4];  // 0..7, 8..15, 16..23, 24..31
        ldmatrix_x4(columns, shared_address(rows + lane % 8 * stride + lane / 8 * 8));
        for (int i = 0; i < 4; ++i) b[i / 2][0][i % 2] = columns[i];
    }
}
template <bool OWNED>
__device__ inline void load_x_steps(XStep<3> (&b)[2], const float* rows, int stride, int lane) {
    const float* row = rows + lane / 4 * stride + lane % 4 * (OWNED ? 4 : 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 v = *reinterpret_cast<const float2*>(row + (OWNED ? 16 * (i / 2) + 2 * (i % 2) : 8 * i));
#pragma unroll
        for (int term = 0; term < 3; ++term) b[i / 2][term][i % 2] = take_bf16(v);
    }
}

}  // namespace qgemm
