// The interface of a format's struct: codes, scales and minimums in the order of tensor core operand A.
//
// Lane 4 g + t (g in 0..7, t in 0..3) holds rows g and g + 8 and columns 2t, 2t + 1, 2t + 8, 2t + 9 of a step, which is
// 16 x 16 weights. `codes` are the words of one lane and k_block; qgemm/cuda/layout/tile.py has their order.
//   fragment(codes, step)    levels (q - zero) of the lane's eight weights, exact halves
//   codes_f16(codes, step)   (level + CODE_BIAS) * 2^-CODE_EXPONENT as halves, in row g + 8 times 2^HIGH_ROW_SHIFT:
//                            masked codes for tensor cores, with the zero not yet subtracted
//   bytes(codes, step)       level + ZERO as bytes, columns 2t, 2t + 8, 2t + 1, 2t + 9 of row g, then of row g + 8
//   scale(m16, g, index), minimum(m16, g, index)   for rows g and g + 8 of 16-row group m16; index counts groups of
//                            GROUP_SIZE weights along the tile
//   place_bytes(first, second, codes, pair)   (level + CODE_BIAS) * 2^slice_shift(step) of two steps as bytes in the
//                            order of bytes(), in row g + 8 times 2^HIGH_ROW_SHIFT: one mask per row where codes have
//                            few bits
//   placed_codes(k_block, m16, lane)          the codes for place_bytes
//   sub_scale_bytes(m16, g, k_block, odd)     the integer factors of a super-block's scale, times 2^SUB_SHIFT, as
//                            signed bytes: row g in the even (odd) step of each pair, then row g + 8
// w = scale * level + minimum.
// SCALE_FACTORS: 1 if scales and minimums are halves, half_scale(m16, g, index) and half_minimum, or with GROUP_ZERO
// -half_scale times half_zero; 2 if they are products of these halves and integers, sub_scale(m16, g, index, unit) and
// sub_minimum, times a unit; 3 if scales have no more bits than a half, but another range; 0 otherwise.
// SUPER_BLOCK with minimums: super_minimum(m16, g) in float, sub_minimums(pairs, m16, g, pair) of two groups as bf16.
// TABLE_BYTES != 0: levels come from a table in shared memory (codes/codebook.cuh). Then codes_f16 and fragment both
// return entries of the table, which may be rounded; levels(codes, step) returns exact floats.
// OWNS_COLUMNS: a k_block also has owned(m16, lane), codes of columns 4t to 4t + 3 of each step, which are cheaper to
// decode where x need not lie in the order of columns. codes_f16 accepts both.
// SCALES_ONCE: decoding a scale costs more than a load, so the lanes of a quad decode scales for each other.
#pragma once

#include "types.cuh"

namespace qgemm {

struct Fragment {
    half2 a[4];  // row g: a[0], a[2] (columns 2t, 2t + 1 and 2t + 8, 2t + 9); row g + 8: a[1], a[3]
};

struct FloatFragment {
    float2 a[4];  // in the order of Fragment
};

struct Bytes {
    u32 row[2];  // rows g and g + 8, four codes each
};

// Whether the fields of a lane's codes have these bits of a code, the field of the lowest bits first.
template <class Codes>
__device__ constexpr bool code_bits_are(int low, int high = 0, int top = 0) {
    return Codes::LOW_BITS == low && Codes::HIGH_BITS == high && Codes::TOP_BITS == top;
}

__device__ inline half2 as_half2(u32 bits) { return *reinterpret_cast<half2*>(&bits); }
__device__ inline __nv_bfloat162 as_bf162(u32 bits) { return *reinterpret_cast<__nv_bfloat162*>(&bits); }
template <class Pair>
__device__ inline u32 bits_of(const Pair& pair) {
    return *reinterpret_cast<const u32*>(&pair);
}

__device__ inline Fragment as_fragment(u32 a0, u32 a1, u32 a2, u32 a3) {
    return {as_half2(a0), as_half2(a1), as_half2(a2), as_half2(a3)};
}

// q - zero, q from bit BIT on of each half-word: (2^(10 - BIT) + q) - (2^(10 - BIT) + zero), both exact. In the half
// 2^(10 - BIT) bit BIT is worth 1, so or-ing q in adds it.
template <int BIT>
__device__ inline half2 levels_from(u32 bits, int zero) {
    constexpr u32 BASE = (25 - BIT) << 10;
    return __hsub2(as_half2(bits | BASE << 16 | BASE), __float2half2_rn((1024 >> BIT) + zero));
}

// Bytes q below 256, one in each half-word -> q - zero times a power of two from 2^-14 to 1: exact.
__device__ inline half2 numbers_from(u32 bytes, int zero, half2 unit) {
    const half2 none = __hmul2(__float2half2_rn(-(1024 + zero)), unit);
    return __hfma2(as_half2(bytes | 0x64006400), unit, none);
}

// Two codes below 128, minus zero, as bf16: 0x4300 is 128 in bf16, whose last place is 1.
__device__ inline u32 bf16_numbers(u32 codes, int zero) {
    const u32 bits = codes | 0x43004300;
    const __nv_bfloat162 numbers =
        __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&bits), __float2bfloat162_rn(128 + zero));
    return *reinterpret_cast<const u32*>(&numbers);
}

// Codes of a format as bf16 without conversion: (level + BIAS) * 2^-EXPONENT, in row g + 8 times 2^SHIFT.
//
// Whole numbers below 256 are the bits of bf16 numbers times 2^133, which tensor cores multiply exactly: masked codes
// are such numbers. A format with other codes defines codes_bf16 and its constants, or has levels alone: EXPONENT 0.
constexpr int BF16_INTEGERS = 133;
template <class Format, class = void>
struct Bf16Codes {
    static constexpr bool MASKED = !Format::CODES_ARE_LEVELS && Format::TABLE_BYTES == 0;
    static constexpr int BIAS = MASKED ? Format::CODE_BIAS : 0, SHIFT = MASKED ? Format::HIGH_ROW_SHIFT : 0;
    static constexpr int EXPONENT = MASKED ? BF16_INTEGERS : 0;

    template <class Codes>
    static __device__ Fragment fragment(const Codes& codes, int step) {
        constexpr int BIT = 24 - Format::CODE_EXPONENT;  // the lowest bit of a code
        Fragment f = Format::codes_f16(codes, step);
        if constexpr (BIT > 0)
#pragma unroll
            for (half2& pair : f.a) pair = as_half2(bits_of(pair) >> BIT);
        return f;
    }
};
template <class Format>
struct Bf16Codes<Format, decltype(void(Format::BF16_BIAS))> {
    static constexpr int BIAS = Format::BF16_BIAS, SHIFT = 0, EXPONENT = Format::BF16_EXPONENT;

    template <class Codes>
    static __device__ Fragment fragment(const Codes& codes, int step) {
        return Format::codes_bf16(codes, step);
    }
};

// Levels as floats, exact in every format.
template <class Format>
__device__ inline FloatFragment float_levels(const typename Format::Codes& codes, int step) {
    if constexpr (Format::TABLE_BYTES != 0) {
        return Format::levels(codes, step);
    } else {
        const Fragment f = Format::fragment(codes, step);
        return {__half22float2(f.a[0]), __half22float2(f.a[1]), __half22float2(f.a[2]), __half22float2(f.a[3])};
    }
}

// Levels as bf16: exact, unless they come from a table, which holds them rounded.
template <class Format, class Codes>
__device__ inline Fragment bf16_levels(const Codes& codes, int step) {
    if constexpr (Format::TABLE_BYTES != 0) {
        return Format::levels_bf16(codes, step);
    } else {
        // Codes below 128; ZERO < 0 marks bytes of eight-bit codes, from which 128 is subtracted.
        constexpr bool SMALL = !Format::CODES_ARE_LEVELS && Format::CODE_BIAS < 128 && Format::ZERO >= 0;
        constexpr int BIT = 24 - Format::CODE_EXPONENT;  // the lowest bit of a code
        Fragment f = SMALL ? Format::codes_f16(codes, step) : Format::fragment(codes, step);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (SMALL) {
                const u32 bits = *reinterpret_cast<u32*>(&f.a[i]) >> (BIT + (i % 2 ? Format::HIGH_ROW_SHIFT : 0));
                f.a[i] = as_half2(bf16_numbers(bits, Format::CODE_BIAS));
            } else {
                const __nv_bfloat162 level = __float22bfloat162_rn(__half22float2(f.a[i]));
                f.a[i] = *reinterpret_cast<const half2*>(&level);
            }
        }
        return f;
    }
}

// An operand A with `code` for every weight, in the form of codes_f16: its product with x subtracts the zero.
__device__ inline Fragment constant_f16(int code, int shift) {
    const u32 sign = code < 0 ? 0x80008000 : 0, bits = 0x00010001 * (code < 0 ? -code : code);
    const half2 low = as_half2(sign | bits), high = as_half2(sign | bits << shift);
    return {low, high, low, high};
}

// Fills the table of a codebook's levels, if there is one, by the first threads of the CTA. No barrier.
template <class Format, class T, int THREADS>
__device__ inline void fill_table(int exponent) {
    if constexpr (Format::TABLE_BYTES != 0) Format::template fill_table<T, THREADS>(exponent);
}

// Fills the table and waits at a barrier; all threads of the CTA take part.
template <class Format, class T, int THREADS>
__device__ inline void share_table(int exponent) {
    fill_table<Format, T, THREADS>(exponent);
    if (Format::TABLE_BYTES != 0) __syncthreads();
}

// Whether a format's minimum is plus or minus its scale: such formats define DELTA.
template <class Format, class = void>
constexpr bool MINIMUM_IS_SCALE = false;
template <class Format>
constexpr bool MINIMUM_IS_SCALE<Format, decltype(void(Format::DELTA))> = true;

// w = scale * level + minimum with two roundings, as ggml and NumPy compute it: no fused multiply-add.
template <class Format>
__device__ float weight(float level, float scale, float minimum) {
    if constexpr (MINIMUM_IS_SCALE<Format>) {  // exact, and no infinite scale meets a level of 0
        const bool minus = (__float_as_uint(scale) ^ __float_as_uint(minimum)) >> 31;
        return __fmul_rn(scale, level + (minus ? -Format::DELTA : Format::DELTA));
    }
    float product = __fmul_rn(scale, level);
    if constexpr (Format::HAS_MINIMUM) return __fadd_rn(product, minimum);
    return product;
}

}  // namespace qgemm
