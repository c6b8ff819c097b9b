// Vectors of 64 bytes in one part: AVX-512 with BW, VL and VNNI.
#pragma once

#include <immintrin.h>

// Lanes i and i + 8 added.
INLINE f32x8 sum_of_halves(f32x16 v) {
    const __m512d all = (__m512d)v.part[0];
    return (f32x8)_mm512_castpd512_pd256(all) + (f32x8)_mm512_extractf64x4_pd(all, 1);
}

#include "x86.h"

// Sixteen bytes after sixteen.
INLINE u8x64 join(u8x16 a, u8x16 b, u8x16 c, u8x16 d) {
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)a), (__m128i)b, 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)c), (__m128i)d, 1);
    return (u8x64){{(u8_part)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)}};
}

// The last sixteen bytes replaced.
INLINE u8x64 with_last_sixteen(u8x64 v, u8x16 last) {
    return (u8x64){{(u8_part)_mm512_inserti32x4((__m512i)v.part[0], (__m128i)last, 3)}};
}

INLINE u8x16 sixteen_of(u8x64 v, int quarter) {
    const __m512i all = (__m512i)v.part[0];
    switch (quarter) {
        case 0:
            return (u8x16)_mm512_castsi512_si128(all);
        case 1:
            return (u8x16)_mm512_extracti32x4_epi32(all, 1);
        case 2:
            return (u8x16)_mm512_extracti32x4_epi32(all, 2);
        default:
            return (u8x16)_mm512_extracti32x4_epi32(all, 3);
    }
}

// How many of two numbers each byte is above.
INLINE u8x64 count_above(u8x64 v, uint8_t low, uint8_t high) {
    const __m512i all = (__m512i)v.part[0], one = _mm512_set1_epi8(1);
    const __m512i found = _mm512_maskz_mov_epi8(_mm512_cmpgt_epu8_mask(all, _mm512_set1_epi8((char)low)), one);
    const __mmask64 above = _mm512_cmpgt_epu8_mask(all, _mm512_set1_epi8((char)high));
    return (u8x64){{(u8_part)_mm512_mask_add_epi8(found, above, found, one)}};
}

// Thirty-two bytes after thirty-two.
INLINE u8x64 join_halves(const uint8_t* a, const uint8_t* b) {
    const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)a));
    return (u8x64){{(u8_part)_mm512_inserti64x4(low, _mm256_loadu_si256((const __m256i*)b), 1)}};
}

// Byte i of each sixteen: that byte of the sixteen of `table` whose number is index[i] % 16.
INLINE u8x64 lookup(u8x64 table, u8x64 index) {
    return (u8x64){{(u8_part)_mm512_shuffle_epi8((__m512i)table.part[0], (__m512i)index.part[0])}};
}

INLINE u8x64 high_nibbles(u8x64 v) {
#ifdef __GFNI__
    const __m512i four_down = _mm512_set1_epi64(0x1020408000000000);  // output bit i is input bit i + 4
    return (u8x64){{(u8_part)_mm512_gf2p8affine_epi64_epi8((__m512i)v.part[0], four_down, 0)}};
#else
    return (u8x64){{v.part[0] >> 4}};
#endif
}

// `value` in each byte that shares a bit with the mask's.
INLINE u8x64 where_bits(u8x64 v, u8x64 mask, uint8_t value) {
    const __mmask64 shared = _mm512_test_epi8_mask((__m512i)v.part[0], (__m512i)mask.part[0]);
    return (u8x64){{(u8_part)_mm512_maskz_set1_epi8(shared, (char)value)}};
}

// `value` in each byte whose bit is set, bit i for byte i.
INLINE u8x64 where_set(uint64_t bits, uint8_t value) {
    return (u8x64){{(u8_part)_mm512_maskz_set1_epi8(bits, (char)value)}};
}

// The same, of a vector that has zeros in those bits.
INLINE u8x64 or_where_set(u8x64 v, uint64_t bits, uint8_t value) {
    const __m512i one = (__m512i)v.part[0];
    return (u8x64){{(u8_part)_mm512_mask_add_epi8(one, bits, one, _mm512_set1_epi8((char)value))}};
}

// acc[i] + the dot product of bytes 4i .. 4i + 3 of codes, unsigned, with those of x, signed.
INLINE i32x16 dot(i32x16 acc, u8x64 codes, i8x64 x) {
    return (i32x16){{(i32_part)_mm512_dpbusd_epi32((__m512i)acc.part[0], (__m512i)codes.part[0], (__m512i)x.part[0])}};
}

// Of each four lanes of a and b: the sums of a's lanes 0 and 2, 1 and 3, then of b's.
INLINE i32x16 half_sums(i32x16 a, i32x16 b) {
    const __m512i one = (__m512i)a.part[0], two = (__m512i)b.part[0];
    return (i32x16){{(i32_part)_mm512_unpacklo_epi64(one, two) + (i32_part)_mm512_unpackhi_epi64(one, two)}};
}

// Of each four lanes of a and b: the sums of a's lanes 0 and 1, 2 and 3, then of b's.
INLINE i32x16 pair_sums(i32x16 a, i32x16 b) {
    const __m512 one = (__m512)a.part[0], two = (__m512)b.part[0];
    return (i32x16){{(i32_part)_mm512_shuffle_ps(one, two, 0x88) + (i32_part)_mm512_shuffle_ps(one, two, 0xdd)}};
}

INLINE i32x8 low_ints(i32x16 v) { return (i32x8)_mm512_castsi512_si256((__m512i)v.part[0]); }
INLINE i32x8 high_ints(i32x16 v) { return (i32x8)_mm512_extracti64x4_epi64((__m512i)v.part[0], 1); }
INLINE f32x8 first_eight(f32x16 v) { return (f32x8)_mm512_castps512_ps256((__m512)v.part[0]); }

// Sums of lanes 2 i and 2 i + 1, in the order of i 0, 1, 4, 5, 2, 3, 6, 7.
INLINE i32x8 pairs_together(i32x16 v) { return pair_sums_of_eight(low_ints(v), high_ints(v)); }

// The first four lanes and the next, added; then those of the upper half.
INLINE i32x8 quads_together(i32x16 v) { return quad_sums_of_eight(low_ints(v), high_ints(v)); }

// Sixteen rows of sixteen words, every `step` vectors -> columns.
static __attribute__((noinline, unused)) void transpose16(u8x64* v, int step) {
    __m512i a[16], b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        const __m512i one = (__m512i)v[i * step].part[0], two = (__m512i)v[(i + 1) * step].part[0];
        a[i] = _mm512_unpacklo_epi32(one, two), a[i + 1] = _mm512_unpackhi_epi32(one, two);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {  // of four rows the words of columns 4 lane + j in b[i + j]
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]), b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]), b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m512i even = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x44),
                      odd = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xee);
        const __m512i even8 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x44);
        const __m512i odd8 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xee);
        v[j * step].part[0] = (u8_part)_mm512_shuffle_i32x4(even, even8, 0x88);
        v[(4 + j) * step].part[0] = (u8_part)_mm512_shuffle_i32x4(even, even8, 0xdd);
        v[(8 + j) * step].part[0] = (u8_part)_mm512_shuffle_i32x4(odd, odd8, 0x88);
        v[(12 + j) * step].part[0] = (u8_part)_mm512_shuffle_i32x4(odd, odd8, 0xdd);
    }
}

INLINE int32_t sum_of_ints(i32x16 v) { return _mm512_reduce_add_epi32((__m512i)v.part[0]); }
INLINE int32_t largest_of_ints(i32x16 v) { return _mm512_reduce_max_epi32((__m512i)v.part[0]); }

INLINE f32x16 join_floats(f32x8 a, f32x8 b) {
    const __m512i low = _mm512_castsi256_si512((__m256i)a);
    return (f32x16){{(f32_part)_mm512_inserti64x4(low, (__m256i)b, 1)}};
}

// Eight numbers, and zeros behind them.
INLINE f32x16 with_zeros(f32x8 v) { return (f32x16){{(f32_part)_mm512_zextps256_ps512((__m256)v)}}; }

// Sixteen signed bytes as numbers.
INLINE f32x16 sixteen_signed(const uint8_t* from) {
    return (f32x16){{(f32_part)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)load16(from)))}};
}

// values[number[i] % 16] in lane i.
INLINE f32x16 spread(f32x16 values, i32x16 number) {
    return (f32x16){{(f32_part)_mm512_permutexvar_ps((__m512i)number.part[0], (__m512)values.part[0])}};
}

// Sixteen unsigned bytes as numbers.
INLINE i32x16 sixteen_ints(const uint8_t* from) {
    return (i32x16){{(i32_part)_mm512_cvtepu8_epi32((__m128i)load16(from))}};
}

// Sixteen halves as floats.
INLINE f32x16 sixteen_halves(const void* from) {
    return (f32x16){{(f32_part)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from))}};
}

// Sixteen floats of which the upper halves lie in memory: bfloat16.
INLINE f32x16 upper_halves(const void* from) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
    return (f32x16){{(f32_part)_mm512_slli_epi32(wide, 16)}};
}

INLINE void store_halves(void* to, f32x16 v) {
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)v.part[0], _MM_FROUND_TO_NEAREST_INT));
}

// The lowest byte of each number.
INLINE void store_low_bytes(void* to, i32x16 v) {
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)v.part[0]));
}

// The lower half of each number.
INLINE void store_low_halves(void* to, i32x16 v) {
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)v.part[0]));
}
