// The seam between formats and kernels: one lane's share of a 16 x 16 step of W, as the tensor cores want operand A.
//
// With g = lane / 4 and t = lane % 4 a lane holds rows g and g + 8, columns 2t, 2t + 1, 2t + 8, 2t + 9 of each step.
// A format header turns the lane's code words (see qgemm/cuda/layout/tile.py for their order) into
//   fragment(codes, step)   the levels q - zero of the eight weights, exact in half
//   codes_f16(codes, step)        the codes as halves times 2^-CODE_EXPONENT, not corrected for zero, for tensor cores;
//                           those of row g + 8 are shifted up by HIGH_ROW_SHIFT bits
//   bytes(codes, step)      the codes q as bytes, columns in the order 2t, 2t + 8, 2t + 1, 2t + 9: row g, row g + 8
//   scale(m16, g, index), minimum(m16, g, index)   of rows g and g + 8 of a group of 16 rows, for the index-th
//                           Format::GROUP_SIZE weights of the tile
// so that w = scale * level + minimum. A super-block's minimums are super_minimum(m16, g) times sub_minimums(...).
// SCALE_FACTORS: scales are exact as halves, half_scale(m16, g, index), or as products of that and an integer, which
// sub_scale(m16, g, index, unit) gives in a unit; minimums likewise.
// A codebook's levels come from a table in shared memory (TABLE_BYTES, see codebook.cuh): codes_f16 and fragment, which
// are the same, give them times 2^-CODE_EXPONENT, rounded to half or what the table holds, levels(codes, step) in
// float, exact.
// SCALES_ONCE: a scale takes more than a load, so that lanes decode them for each other.
#pragma once

#include "ptx/lop3.cuh"
#include "types.cuh"

struct Fragment {
    half2 a[4];  // row g: a[0], a[2] (columns 2t, 2t + 1 and 2t + 8, 2t + 9); row g + 8: a[1], a[3]
};

struct FloatFragment {
    float2 a[4];  // the same
};

struct Bytes {
    u32 row[2];  // rows g and g + 8, four codes each
};

__device__ inline half2 as_half2(u32 bits) { return *reinterpret_cast<half2*>(&bits); }

// Halves 2^(10 - BIT) + q less 2^(10 - BIT) + zero, q at this bit: in the half 2^(10 - BIT) it is 1, so or-ing q in
// adds it.
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

// A word of eight nibbles: byte j is column j of row g (low) and of row g + 8 (high).
__device__ inline Fragment nibble_fragment(u32 word, int zero) {
    u32 high = word >> 8;
    return {levels_from<0>(word & 0x000f000f, zero), levels_from<4>(word & 0x00f000f0, zero),
            levels_from<0>(high & 0x000f000f, zero), levels_from<4>(high & 0x00f000f0, zero)};
}

__device__ inline Bytes nibble_bytes(u32 word) { return {word & 0x0f0f0f0f, (word >> 4) & 0x0f0f0f0f}; }

// Four signed bytes q <-> q + 128.
__device__ inline u32 signed_bytes(u32 word) { return word ^ 0x80808080; }

// Four signed bytes of one row, columns 2t, 2t + 8, 2t + 1, 2t + 9 -> halves of columns (2t, 2t + 1), (2t + 8, 2t + 9).
__device__ inline void signed_byte_levels(u32 word, half2& near, half2& far) {
    const u32 biased = signed_bytes(word);
    near = levels_from<0>(__byte_perm(biased, 0, 0x4240), 128);
    far = levels_from<0>(__byte_perm(biased, 0, 0x4341), 128);
}

// Bits in which two words differ, masked, in one instruction.
template <u32 MASK>
__device__ inline u32 lop3_and_xor(u32 a, u32 b) {
    return lop3_xor_and<MASK>(a, b);
}

// Codes without their zero, as subnormal halves: the bits of code q are the half q * 2^-24, and shifted by s bits
// q * 2^(s - 24). Tensor cores multiply subnormals exactly, so decoding is masking alone; the zero is corrected in
// the accumulator, and the power of two at the end. Codes of rows g + 8 are shifted by HIGH_ROW_SHIFT.
__device__ inline Fragment codes_f16(u32 a0, u32 a1, u32 a2, u32 a3) {
    return {as_half2(a0), as_half2(a1), as_half2(a2), as_half2(a3)};
}

__device__ inline Fragment nibbles_f16(u32 word) {
    const u32 high = word >> 8;
    return codes_f16(word & 0x000f000f, word & 0x00f000f0, high & 0x000f000f, high & 0x00f000f0);
}

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

// The table of a codebook's levels, if there is one, by the first threads of the CTA; whoever reads it waits for them.
template <class Format, class T, int THREADS>
__device__ inline void fill_table(int exponent) {
    if constexpr (Format::TABLE_BYTES != 0) Format::template fill_table<T, THREADS>(exponent);
}
// The same by all threads, who wait for each other.
template <class Format, class T, int THREADS>
__device__ inline void share_table(int exponent) {
    fill_table<Format, T, THREADS>(exponent);
    if (Format::TABLE_BYTES != 0) __syncthreads();
}

// Two codes below 128 minus zero, as bf16: 0x4300 is 128 in bf16, whose last place is 1.
__device__ inline u32 bf16_numbers(u32 codes, int zero) {
    const u32 bits = codes | 0x43004300;
    const __nv_bfloat162 numbers =
        __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&bits), __float2bfloat162_rn(128 + zero));
    return *reinterpret_cast<const u32*>(&numbers);
}

// Levels as bf16, exact as well, but for a codebook's, of which the table holds bf16.
template <class Format>
__device__ inline Fragment bf16_levels(const typename Format::Codes& codes, int step) {
    if constexpr (Format::TABLE_BYTES != 0) return Format::codes_f16(codes, step);
    constexpr bool SMALL = Format::CODE_EXPONENT == 24 && Format::CODE_BIAS < 128;
    Fragment f = SMALL ? Format::codes_f16(codes, step) : Format::fragment(codes, step);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (SMALL) {
            const u32 bits = *reinterpret_cast<u32*>(&f.a[i]) >> (i % 2 ? Format::HIGH_ROW_SHIFT : 0);
            f.a[i] = as_half2(bf16_numbers(bits, Format::CODE_BIAS));
        } else {
            const __nv_bfloat162 level = __float22bfloat162_rn(__half22float2(f.a[i]));
            f.a[i] = *reinterpret_cast<const half2*>(&level);
        }
    }
    return f;
}

// The same fraction of every row's unit: -zero as a code.
__device__ inline Fragment constant_f16(int code, int shift) {
    const u32 sign = code < 0 ? 0x80008000 : 0, bits = 0x00010001 * (code < 0 ? -code : code);
    const half2 low = as_half2(sign | bits), high = as_half2(sign | bits << shift);
    return {low, high, low, high};
}

// A scale or minimum of rows g and g + 8.
__device__ inline half2 half_pair(const half (&pair)[2]) { return *reinterpret_cast<const half2*>(pair); }
__device__ inline float2 row_pair(const half (&pair)[2]) { return __half22float2(half_pair(pair)); }

// The scales of a format that has them as halves in its field d.
template <class Fields>
struct HalfScales : Fields {
    __device__ half2 half_scale(int m16, int g, int block) const { return half_pair(this->d[m16][g][block]); }
    __device__ half2 half_minimum(int, int, int) const { return {}; }
    __device__ float2 scale(int m16, int g, int block) const { return row_pair(this->d[m16][g][block]); }
    __device__ float2 minimum(int, int, int) const { return {}; }
};

// And minimums in its field m.
template <class Fields>
struct HalfMinimums : HalfScales<Fields> {
    __device__ half2 half_minimum(int m16, int g, int block) const { return half_pair(this->m[m16][g][block]); }
    __device__ float2 minimum(int m16, int g, int block) const { return row_pair(this->m[m16][g][block]); }
};

// Rounded once, as NumPy rounds a product of float32.
__device__ inline float2 multiply_rounded(float2 a, float2 b) { return {__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y)}; }

// w = scale * level + minimum with two roundings, as ggml and NumPy compute it: no fused multiply-add.
template <class Format>
__device__ float weight(float level, float scale, float minimum) {
    float product = __fmul_rn(scale, level);
    if constexpr (Format::HAS_MINIMUM) return __fadd_rn(product, minimum);
    return product;
}
