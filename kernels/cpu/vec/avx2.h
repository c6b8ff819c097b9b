// Vectors of 64 bytes in two parts: AVX2, with VNNI where the CPU has it.
#pragma once

#include "intrinsics.h"

// Lane i is the sum of lanes i and i + 8 of v.
INLINE f32x8 add_halves(f32x16 v) { return v.part[0] + v.part[1]; }

#include "x86.h"

// A vector that stays in registers: GCC would load it again for each instruction that multiplies it, and two loads a
// clock are fewer than the multiplications.
INLINE f32x16 load_operand(const f32x16* from) {
    f32x16 result = *from;
    EACH_PART __asm__("" : "+x"(result.part[i]));
    return result;
}

// A sum that later additions must not be merged with: GCC would compute all products first, in memory.
INLINE i32x16 settle(i32x16 sum) {
    EACH_PART __asm__("" : "+x"(sum.part[i]));
    return sum;
}

// Concatenates four vectors of 16 bytes.
INLINE u8x64 join(u8x16 a, u8x16 b, u8x16 c, u8x16 d) {
    u8x64 result;
    result.part[0] = (u8_part)_mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)a), (__m128i)b, 1);
    result.part[1] = (u8_part)_mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)c), (__m128i)d, 1);
    return result;
}

// The transposed 8 x 8 words of one half of eight rows; row i is v[i * step].
INLINE void transpose8(__m256 to[8], const u8x64* v, int step, int half) {
#pragma GCC unroll 2
    for (int quarter = 0; quarter < 2; ++quarter) {
        __m256 row[4];  // four words of row i, then of row i + 4
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const float* low = (const float*)&v[i * step].part[half] + 4 * quarter;
            const float* high = (const float*)&v[(i + 4) * step].part[half] + 4 * quarter;
            row[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
        }
        const __m256d ab = (__m256d)_mm256_unpacklo_ps(row[0], row[1]),
                      cd = (__m256d)_mm256_unpacklo_ps(row[2], row[3]);
        const __m256d ab_high = (__m256d)_mm256_unpackhi_ps(row[0], row[1]);
        const __m256d cd_high = (__m256d)_mm256_unpackhi_ps(row[2], row[3]);
        to[4 * quarter] = (__m256)_mm256_unpacklo_pd(ab, cd), to[4 * quarter + 1] = (__m256)_mm256_unpackhi_pd(ab, cd);
        to[4 * quarter + 2] = (__m256)_mm256_unpacklo_pd(ab_high, cd_high);
        to[4 * quarter + 3] = (__m256)_mm256_unpackhi_pd(ab_high, cd_high);
    }
}

INLINE void store8(u8x64* v, int step, int half, const __m256 words[8]) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) v[i * step].part[half] = (u8_part)words[i];
}

// Transposes 16 x 16 words in place; row i is v[i * step].
static __attribute__((noinline, unused)) void transpose16(u8x64* v, int step) {
    __m256 upper[8], lower[8];
    transpose8(upper, v, step, 0), store8(v, step, 0, upper);
    transpose8(upper, v + 8 * step, step, 1), store8(v + 8 * step, step, 1, upper);
    transpose8(upper, v, step, 1), transpose8(lower, v + 8 * step, step, 0);
    store8(v + 8 * step, step, 0, upper), store8(v, step, 1, lower);
}

// Replaces the last 16 bytes.
INLINE u8x64 replace_last_quarter(u8x64 v, u8x16 last) {
    v.part[1] = (u8_part)_mm256_inserti128_si256((__m256i)v.part[1], (__m128i)last, 1);
    return v;
}

INLINE u8x16 extract_quarter(u8x64 v, int quarter) {
    const __m256i half = (__m256i)v.part[quarter / 2];
    return (u8x16)(quarter % 2 ? _mm256_extracti128_si256(half, 1) : _mm256_castsi256_si128(half));
}

// Concatenates 32 bytes at a and 32 bytes at b.
INLINE u8x64 join_halves(const uint8_t* a, const uint8_t* b) {
    u8x64 result;
    memcpy(&result.part[0], a, PART), memcpy(&result.part[1], b, PART);
    return result;
}

// Looks up bytes within each quarter of 16: byte i is entry index[i] % 16 of the same quarter of `table`.
INLINE u8x64 lookup(u8x64 table, u8x64 index) {
    EACH_PART table.part[i] = (u8_part)_mm256_shuffle_epi8((__m256i)table.part[i], (__m256i)index.part[i]);
    return table;
}

// acc[i] + the dot product of bytes 4i to 4i + 3 of the unsigned codes and the signed x.
INLINE i32x16 dot(i32x16 acc, u8x64 codes, i8x64 x) {
    EACH_PART {
        const __m256i a = (__m256i)codes.part[i], b = (__m256i)x.part[i];
#if defined(__AVXVNNI__)
        acc.part[i] = (i32_part)_mm256_dpbusd_avx_epi32((__m256i)acc.part[i], a, b);
#else  // maddubs saturates for codes from 128 on, so the high bit is multiplied separately
        const __m256i low = CODE_BITS == 8 ? _mm256_and_si256(a, _mm256_set1_epi8(127)) : a;
        acc.part[i] += (i32_part)_mm256_madd_epi16(_mm256_maddubs_epi16(low, b), _mm256_set1_epi16(1));
        if (CODE_BITS == 8) {
            const __m256i high = _mm256_and_si256(_mm256_srli_epi16(a, 7), _mm256_set1_epi8(1));
            acc.part[i] += (i32_part)_mm256_madd_epi16(_mm256_maddubs_epi16(high, b), _mm256_set1_epi16(128));
        }
#endif
    }
    return acc;
}

#if !defined(__AVXVNNI__)
#define SIGNED_DOT
INLINE i8x64 magnitudes(i8x64 v) {
    EACH_PART v.part[i] = (i8_part)_mm256_abs_epi8((__m256i)v.part[i]);
    return v;
}

// acc[i] + the dot product of bytes 4i to 4i + 3: size, |b|, times a with the sign of b. Bytes of a that are -128 keep
// their sign; correct_least repairs their products with negative b.
INLINE i32x16 add_signed_dot(i32x16 acc, i8x64 a, i8x64 b, i8x64 size) {
    EACH_PART {
        const __m256i with_sign = _mm256_sign_epi8((__m256i)a.part[i], (__m256i)b.part[i]);
        const __m256i products = _mm256_maddubs_epi16((__m256i)size.part[i], with_sign);
        acc.part[i] += (i32_part)_mm256_madd_epi16(products, _mm256_set1_epi16(1));
    }
    return acc;
}

// acc[i] + 256 |b| of the bytes 4i to 4i + 3 where a is -128 and b is negative.
INLINE i32x16 correct_least(i32x16 acc, i8x64 a, i8x64 b) {
    EACH_PART {
        const __m256i least = _mm256_cmpeq_epi8((__m256i)a.part[i], _mm256_set1_epi8(-128));
        const __m256i negative = _mm256_min_epi8((__m256i)b.part[i], _mm256_setzero_si256());
        const __m256i size = _mm256_and_si256(_mm256_abs_epi8(negative), least);
        const __m256i sums = _mm256_maddubs_epi16(size, _mm256_set1_epi8(1));
        acc.part[i] += (i32_part)_mm256_madd_epi16(sums, _mm256_set1_epi16(256));
    }
    return acc;
}

// The lesser of each two signed bytes.
INLINE i8x64 least_levels(i8x64 a, i8x64 b) {
    EACH_PART a.part[i] = (i8_part)_mm256_min_epi8((__m256i)a.part[i], (__m256i)b.part[i]);
    return a;
}

INLINE int has_level(i8x64 levels, int8_t level) {
    __m256i equal = _mm256_setzero_si256();
    EACH_PART equal = _mm256_or_si256(equal, _mm256_cmpeq_epi8((__m256i)levels.part[i], _mm256_set1_epi8(level)));
    return _mm256_movemask_epi8(equal) != 0;
}

// acc[i] + the two sums of 16 bits in lane i.
INLINE i32x16 add_shorts(i32x16 acc, i32x16 sums) {
    EACH_PART acc.part[i] += (i32_part)_mm256_madd_epi16((__m256i)sums.part[i], _mm256_set1_epi16(1));
    return acc;
}
#endif

#if CODE_BITS < 7 && !defined(__AVXVNNI__)
// Words of four codes whose products with x, in -128..127, add up to sums of 16 bits without overflow.
#define SHORT_WORDS (CODE_BITS <= 4 ? 8 : CODE_BITS == 5 ? 4 : 2)

// sums of 16 bits, plus two products each.
INLINE i32x16 add_short_dot(i32x16 sums, u8x64 codes, i8x64 x) {
    EACH_PART {
        const __m256i products = _mm256_maddubs_epi16((__m256i)codes.part[i], (__m256i)x.part[i]);
        sums.part[i] = (i32_part)_mm256_add_epi16((__m256i)sums.part[i], products);
    }
    return sums;
}
#endif

#if CODE_BITS <= 5 && !defined(__AVXVNNI__)  // eight products fit in 16 bits: half as many additions
#define SHORT_SUMS
// 32 sums of two products in 16 bits, for codes of at most five bits.
INLINE i32x16 short_dot(u8x64 codes, i8x64 x) {
    i32x16 result;
    EACH_PART result.part[i] = (i32_part)_mm256_maddubs_epi16((__m256i)codes.part[i], (__m256i)x.part[i]);
    return result;
}

// Widens the 16-bit sums of short_dot: equals pair_sums(half_sums(a, b), half_sums(c, d)) of the 32-bit dot products of
// acc = {a, b, c, d}.
INLINE i32x16 sum_shorts(const i32x16 acc[4]) {
    i32x16 result;
    EACH_PART {
        const __m256i a = (__m256i)acc[0].part[i], b = (__m256i)acc[1].part[i];
        const __m256i c = (__m256i)acc[2].part[i], d = (__m256i)acc[3].part[i];
        const __m256 ab = (__m256)_mm256_add_epi16(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
        const __m256 cd = (__m256)_mm256_add_epi16(_mm256_unpacklo_epi64(c, d), _mm256_unpackhi_epi64(c, d));
        const __m256i even = (__m256i)_mm256_shuffle_ps(ab, cd, 0x88), odd = (__m256i)_mm256_shuffle_ps(ab, cd, 0xdd);
        result.part[i] = (i32_part)_mm256_madd_epi16(_mm256_add_epi16(even, odd), _mm256_set1_epi16(1));
    }
    return result;
}
#endif

// For each four lanes: (a0 + a2, a1 + a3, b0 + b2, b1 + b3).
INLINE i32x16 half_sums(i32x16 a, i32x16 b) {
    EACH_PART {
        const __m256i x = (__m256i)a.part[i], y = (__m256i)b.part[i];
        a.part[i] = (i32_part)_mm256_unpacklo_epi64(x, y) + (i32_part)_mm256_unpackhi_epi64(x, y);
    }
    return a;
}

// For each four lanes: (a0 + a1, a2 + a3, b0 + b1, b2 + b3).
INLINE i32x16 pair_sums(i32x16 a, i32x16 b) {
    EACH_PART a.part[i] = (i32_part)_mm256_hadd_epi32((__m256i)a.part[i], (__m256i)b.part[i]);
    return a;
}

INLINE f32x8 first_eight(f32x16 v) { return v.part[0]; }

// Sums of adjacent lanes. Result lane j is the sum of lanes 2i and 2i + 1 with i = 0, 1, 4, 5, 2, 3, 6, 7.
INLINE i32x8 sum_pairs(i32x16 v) { return pair_sums_8(v.part[0], v.part[1]); }

// The first quarter of lanes plus the second, then the third plus the fourth.
INLINE i32x8 sum_quarters(i32x16 v) { return quad_sums_8(v.part[0], v.part[1]); }

INLINE f32x16 join_floats(f32x8 a, f32x8 b) { return (f32x16){{a, b}}; }

// Eight floats in the low half, zeros in the high half.
INLINE f32x16 zero_extend(f32x8 v) { return (f32x16){{v, {0}}}; }

// Sixteen signed bytes as floats.
INLINE f32x16 load_signed_bytes(const uint8_t* from) {
    f32x16 result;
    EACH_PART {
        const __m256i numbers = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8 * i)));
        result.part[i] = (f32_part)_mm256_cvtepi32_ps(numbers);
    }
    return result;
}

// Lane i is values[index[i] % 16].
INLINE f32x16 permute(f32x16 values, i32x16 index) {
    f32x16 result;
    EACH_PART {
        const __m256i n = (__m256i)index.part[i];
        const __m256 low = _mm256_permutevar8x32_ps((__m256)values.part[0], n);
        const __m256 high = _mm256_permutevar8x32_ps((__m256)values.part[1], n);
        result.part[i] = (f32_part)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(n, 28)));
    }
    return result;
}

// Sixteen unsigned bytes as integers.
INLINE i32x16 load_bytes_as_ints(const uint8_t* from) {
    i32x16 result;
    EACH_PART result.part[i] = (i32_part)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8 * i)));
    return result;
}

// Sixteen halves as floats.
INLINE f32x16 load_halves(const void* from) {
    f32x16 result;
    EACH_PART result.part[i] = (f32_part)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from + i));
    return result;
}

// Sixteen bfloat16 numbers as floats.
INLINE f32x16 load_bfloats(const void* from) {
    f32x16 result;
    EACH_PART {
        const __m128i half = _mm_loadu_si128((const __m128i*)from + i);
        result.part[i] = (f32_part)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
    }
    return result;
}

INLINE void store_halves(void* to, f32x16 v) {
    EACH_PART _mm_storeu_si128((__m128i*)to + i, _mm256_cvtps_ph((__m256)v.part[i], _MM_FROUND_TO_NEAREST_INT));
}

// Stores the lowest byte of each integer.
INLINE void store_low_bytes(void* to, i32x16 v) {
    const __m256i low = _mm256_set1_epi32(0xff);
    const __m256i first = _mm256_and_si256((__m256i)v.part[0], low), second = _mm256_and_si256((__m256i)v.part[1], low);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xd8);
    _mm_storeu_si128((__m128i*)to,
                     _mm_packus_epi16(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1)));
}

// Stores the lower 16 bits of each integer.
INLINE void store_low_halves(void* to, i32x16 v) {
    const __m256i low = _mm256_set1_epi32(0xffff);
    const __m256i first = _mm256_and_si256((__m256i)v.part[0], low), second = _mm256_and_si256((__m256i)v.part[1], low);
    const __m256i packed = _mm256_packus_epi32(first, second);  // lane order: 0 to 3, 8 to 11, 4 to 7, 12 to 15
    _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(packed, 0xd8));
}
