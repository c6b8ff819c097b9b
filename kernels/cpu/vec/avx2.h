// Vectors of 64 bytes in two parts: AVX2, with VNNI where the CPU has it.
#pragma once

#include <immintrin.h>

// Lanes i and i + 8 added.
INLINE f32x8 sum_of_halves(f32x16 v) { return v.part[0] + v.part[1]; }

#include "x86.h"

// Sixteen bytes after sixteen.
INLINE u8x64 join(u8x16 a, u8x16 b, u8x16 c, u8x16 d) {
    u8x64 found;
    found.part[0] = (u8_part)_mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)a), (__m128i)b, 1);
    found.part[1] = (u8_part)_mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)c), (__m128i)d, 1);
    return found;
}

// The last sixteen bytes replaced.
INLINE u8x64 with_last_sixteen(u8x64 v, u8x16 last) {
    v.part[1] = (u8_part)_mm256_inserti128_si256((__m256i)v.part[1], (__m128i)last, 1);
    return v;
}

INLINE u8x16 sixteen_of(u8x64 v, int quarter) {
    const __m256i half = (__m256i)v.part[quarter / 2];
    return (u8x16)(quarter % 2 ? _mm256_extracti128_si256(half, 1) : _mm256_castsi256_si128(half));
}

// Thirty-two bytes after thirty-two.
INLINE u8x64 join_halves(const uint8_t* a, const uint8_t* b) {
    u8x64 found;
    memcpy(&found.part[0], a, PART), memcpy(&found.part[1], b, PART);
    return found;
}

// Byte i of each sixteen: that byte of the sixteen of `table` whose number is index[i] % 16.
INLINE u8x64 lookup(u8x64 table, u8x64 index) {
    EACH table.part[i] = (u8_part)_mm256_shuffle_epi8((__m256i)table.part[i], (__m256i)index.part[i]);
    return table;
}

// acc[i] + the dot product of bytes 4i .. 4i + 3 of codes, unsigned, with those of x, signed.
INLINE i32x16 dot(i32x16 acc, u8x64 codes, i8x64 x) {
    EACH {
        const __m256i a = (__m256i)codes.part[i], b = (__m256i)x.part[i];
#if defined(__AVXVNNI__)
        acc.part[i] = (i32_part)_mm256_dpbusd_avx_epi32((__m256i)acc.part[i], a, b);
#else  // sums of two products saturate for codes from 128 on: their high bit counts apart, if codes have it
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

#if CODE_BITS <= 5 && !defined(__AVXVNNI__)  // sums of eight products are below 2^15: half as many additions
#define SHORT_SUMS
// Sums of two products each, thirty-two.
INLINE i32x16 short_dot(u8x64 codes, i8x64 x) {
    i32x16 found;
    EACH found.part[i] = (i32_part)_mm256_maddubs_epi16((__m256i)codes.part[i], (__m256i)x.part[i]);
    return found;
}

// As pair_sums(half_sums(a, b), half_sums(c, d)) of the numbers that each two of them are the halves of.
INLINE i32x16 sums_of_shorts(const i32x16 acc[4]) {
    i32x16 found;
    EACH {
        const __m256i a = (__m256i)acc[0].part[i], b = (__m256i)acc[1].part[i];
        const __m256i c = (__m256i)acc[2].part[i], d = (__m256i)acc[3].part[i];
        const __m256 ab = (__m256)_mm256_add_epi16(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
        const __m256 cd = (__m256)_mm256_add_epi16(_mm256_unpacklo_epi64(c, d), _mm256_unpackhi_epi64(c, d));
        const __m256i even = (__m256i)_mm256_shuffle_ps(ab, cd, 0x88), odd = (__m256i)_mm256_shuffle_ps(ab, cd, 0xdd);
        found.part[i] = (i32_part)_mm256_madd_epi16(_mm256_add_epi16(even, odd), _mm256_set1_epi16(1));
    }
    return found;
}
#endif

// Of each four lanes of a and b: the sums of a's lanes 0 and 2, 1 and 3, then of b's.
INLINE i32x16 half_sums(i32x16 a, i32x16 b) {
    EACH {
        const __m256i one = (__m256i)a.part[i], two = (__m256i)b.part[i];
        a.part[i] = (i32_part)_mm256_unpacklo_epi64(one, two) + (i32_part)_mm256_unpackhi_epi64(one, two);
    }
    return a;
}

// Of each four lanes of a and b: the sums of a's lanes 0 and 1, 2 and 3, then of b's.
INLINE i32x16 pair_sums(i32x16 a, i32x16 b) {
    EACH a.part[i] = (i32_part)_mm256_hadd_epi32((__m256i)a.part[i], (__m256i)b.part[i]);
    return a;
}

INLINE f32x8 first_eight(f32x16 v) { return v.part[0]; }

// Sums of lanes 2 i and 2 i + 1, in the order of i 0, 1, 4, 5, 2, 3, 6, 7.
INLINE i32x8 pairs_together(i32x16 v) { return pair_sums_of_eight(v.part[0], v.part[1]); }

// The first four lanes and the next, added; then those of the upper half.
INLINE i32x8 quads_together(i32x16 v) { return quad_sums_of_eight(v.part[0], v.part[1]); }

INLINE f32x16 join_floats(f32x8 a, f32x8 b) { return (f32x16){{a, b}}; }

// Eight numbers, and zeros behind them.
INLINE f32x16 with_zeros(f32x8 v) { return (f32x16){{v, {0}}}; }

// Sixteen signed bytes as numbers.
INLINE f32x16 sixteen_signed(const uint8_t* from) {
    f32x16 found;
    EACH {
        const __m256i numbers = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8 * i)));
        found.part[i] = (f32_part)_mm256_cvtepi32_ps(numbers);
    }
    return found;
}

// values[number[i] % 16] in lane i.
INLINE f32x16 spread(f32x16 values, i32x16 number) {
    f32x16 found;
    EACH {
        const __m256i n = (__m256i)number.part[i];
        const __m256 low = _mm256_permutevar8x32_ps((__m256)values.part[0], n);
        const __m256 high = _mm256_permutevar8x32_ps((__m256)values.part[1], n);
        found.part[i] = (f32_part)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(n, 28)));
    }
    return found;
}

// Sixteen unsigned bytes as numbers.
INLINE i32x16 sixteen_ints(const uint8_t* from) {
    i32x16 found;
    EACH found.part[i] = (i32_part)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8 * i)));
    return found;
}

// Sixteen halves as floats.
INLINE f32x16 sixteen_halves(const void* from) {
    f32x16 found;
    EACH found.part[i] = (f32_part)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from + i));
    return found;
}

// Sixteen floats of which the upper halves lie in memory: bfloat16.
INLINE f32x16 upper_halves(const void* from) {
    f32x16 found;
    EACH {
        const __m128i half = _mm_loadu_si128((const __m128i*)from + i);
        found.part[i] = (f32_part)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
    }
    return found;
}

INLINE void store_halves(void* to, f32x16 v) {
    EACH _mm_storeu_si128((__m128i*)to + i, _mm256_cvtps_ph((__m256)v.part[i], _MM_FROUND_TO_NEAREST_INT));
}

// The lowest byte of each number.
INLINE void store_low_bytes(void* to, i32x16 v) {
    const __m256i low = _mm256_set1_epi32(0xff);
    const __m256i first = _mm256_and_si256((__m256i)v.part[0], low), second = _mm256_and_si256((__m256i)v.part[1], low);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xd8);
    _mm_storeu_si128((__m128i*)to,
                     _mm_packus_epi16(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1)));
}

// The lower half of each number.
INLINE void store_low_halves(void* to, i32x16 v) {
    const __m256i low = _mm256_set1_epi32(0xffff);
    const __m256i first = _mm256_and_si256((__m256i)v.part[0], low), second = _mm256_and_si256((__m256i)v.part[1], low);
    const __m256i packed = _mm256_packus_epi32(first, second);  // by lanes: 0 to 3, 8 to 11, 4 to 7, 12 to 15
    _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(packed, 0xd8));
}
