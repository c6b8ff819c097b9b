// Vectors of 64 bytes in one part: AVX-512 with BW, VL and VNNI.
#pragma once

#include "intrinsics.h"

// Lane i is the sum of lanes i and i + 8 of v.
INLINE f32x8 add_halves(f32x16 v) {
    const __m512d bytes = (__m512d)v.part[0];
    return (f32x8)_mm512_castpd512_pd256(bytes) + (f32x8)_mm512_extractf64x4_pd(bytes, 1);
}

#include "x86.h"

// A vector that many instructions multiply.
INLINE f32x16 load_operand(const f32x16* from) { return *from; }

// A sum that later additions must not be merged with.
INLINE i32x16 settle(i32x16 sum) { return sum; }

// Concatenates four vectors of 16 bytes.
INLINE u8x64 join(u8x16 a, u8x16 b, u8x16 c, u8x16 d) {
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)a), (__m128i)b, 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)c), (__m128i)d, 1);
    return (u8x64){{(u8_part)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)}};
}

// Replaces the last 16 bytes.
INLINE u8x64 replace_last_quarter(u8x64 v, u8x16 last) {
    return (u8x64){{(u8_part)_mm512_inserti32x4((__m512i)v.part[0], (__m128i)last, 3)}};
}

INLINE u8x16 extract_quarter(u8x64 v, int quarter) {
    const __m512i bytes = (__m512i)v.part[0];
    switch (quarter) {
        case 0:
            return (u8x16)_mm512_castsi512_si128(bytes);
        case 1:
            return (u8x16)_mm512_extracti32x4_epi32(bytes, 1);
        case 2:
            return (u8x16)_mm512_extracti32x4_epi32(bytes, 2);
        default:
            return (u8x16)_mm512_extracti32x4_epi32(bytes, 3);
    }
}

// Byte i is the number of thresholds (low, high) that byte i of v exceeds: 0, 1 or 2.
INLINE u8x64 count_above(u8x64 v, uint8_t low, uint8_t high) {
    const __m512i bytes = (__m512i)v.part[0], ones = _mm512_set1_epi8(1);
    const __m512i count = _mm512_maskz_mov_epi8(_mm512_cmpgt_epu8_mask(bytes, _mm512_set1_epi8((char)low)), ones);
    const __mmask64 above = _mm512_cmpgt_epu8_mask(bytes, _mm512_set1_epi8((char)high));
    return (u8x64){{(u8_part)_mm512_mask_add_epi8(count, above, count, ones)}};
}

// Concatenates 32 bytes at a and 32 bytes at b.
INLINE u8x64 join_halves(const uint8_t* a, const uint8_t* b) {
    const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)a));
    return (u8x64){{(u8_part)_mm512_inserti64x4(low, _mm256_loadu_si256((const __m256i*)b), 1)}};
}

// Looks up bytes within each quarter of 16: byte i is entry index[i] % 16 of the same quarter of `table`.
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

// Byte i is `value` where v and mask share a bit in byte i, else 0.
INLINE u8x64 where_bits(u8x64 v, u8x64 mask, uint8_t value) {
    const __mmask64 shared = _mm512_test_epi8_mask((__m512i)v.part[0], (__m512i)mask.part[0]);
    return (u8x64){{(u8_part)_mm512_maskz_set1_epi8(shared, (char)value)}};
}

// Byte i is `value` where bit i of `bits` is set, else 0.
INLINE u8x64 where_set(uint64_t bits, uint8_t value) {
    return (u8x64){{(u8_part)_mm512_maskz_set1_epi8(bits, (char)value)}};
}

// Adds `value` to byte i of v where bit i of `bits` is set. v must be zero in the bits of `value`.
INLINE u8x64 or_where_set(u8x64 v, uint64_t bits, uint8_t value) {
    const __m512i bytes = (__m512i)v.part[0];
    return (u8x64){{(u8_part)_mm512_mask_add_epi8(bytes, bits, bytes, _mm512_set1_epi8((char)value))}};
}

// acc[i] + the dot product of bytes 4i to 4i + 3 of the unsigned codes and the signed x.
INLINE i32x16 dot(i32x16 acc, u8x64 codes, i8x64 x) {
    return (i32x16){{(i32_part)_mm512_dpbusd_epi32((__m512i)acc.part[0], (__m512i)codes.part[0], (__m512i)x.part[0])}};
}

// For each four lanes: (a0 + a2, a1 + a3, b0 + b2, b1 + b3).
INLINE i32x16 half_sums(i32x16 a, i32x16 b) {
    const __m512i x = (__m512i)a.part[0], y = (__m512i)b.part[0];
    return (i32x16){{(i32_part)_mm512_unpacklo_epi64(x, y) + (i32_part)_mm512_unpackhi_epi64(x, y)}};
}

// For each four lanes: (a0 + a1, a2 + a3, b0 + b1, b2 + b3).
INLINE i32x16 pair_sums(i32x16 a, i32x16 b) {
    const __m512 x = (__m512)a.part[0], y = (__m512)b.part[0];
    return (i32x16){{(i32_part)_mm512_shuffle_ps(x, y, 0x88) + (i32_part)_mm512_shuffle_ps(x, y, 0xdd)}};
}

INLINE i32x8 low_ints(i32x16 v) { return (i32x8)_mm512_castsi512_si256((__m512i)v.part[0]); }
INLINE i32x8 high_ints(i32x16 v) { return (i32x8)_mm512_extracti64x4_epi64((__m512i)v.part[0], 1); }
INLINE f32x8 first_eight(f32x16 v) { return (f32x8)_mm512_castps512_ps256((__m512)v.part[0]); }

// Sums of adjacent lanes. Result lane j is the sum of lanes 2i and 2i + 1 with i = 0, 1, 4, 5, 2, 3, 6, 7.
INLINE i32x8 sum_pairs(i32x16 v) { return pair_sums_8(low_ints(v), high_ints(v)); }

// The first quarter of lanes plus the second, then the third plus the fourth.
INLINE i32x8 sum_quarters(i32x16 v) { return quad_sums_8(low_ints(v), high_ints(v)); }

// Transposes 16 x 16 words in place; row i is v[i * step].
static __attribute__((noinline, unused)) void transpose16(u8x64* v, int step) {
    __m512i a[16], b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        const __m512i low = (__m512i)v[i * step].part[0], high = (__m512i)v[(i + 1) * step].part[0];
        a[i] = _mm512_unpacklo_epi32(low, high), a[i + 1] = _mm512_unpackhi_epi32(low, high);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {  // b[i + j]: columns 4 * lane + j of rows i to i + 3
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

INLINE int32_t reduce_add_ints(i32x16 v) { return _mm512_reduce_add_epi32((__m512i)v.part[0]); }
INLINE int32_t reduce_max_ints(i32x16 v) { return _mm512_reduce_max_epi32((__m512i)v.part[0]); }

INLINE f32x16 join_floats(f32x8 a, f32x8 b) {
    const __m512i low = _mm512_castsi256_si512((__m256i)a);
    return (f32x16){{(f32_part)_mm512_inserti64x4(low, (__m256i)b, 1)}};
}

// Eight floats in the low half, zeros in the high half.
INLINE f32x16 zero_extend(f32x8 v) { return (f32x16){{(f32_part)_mm512_zextps256_ps512((__m256)v)}}; }

// Sixteen signed bytes as floats.
INLINE f32x16 load_signed_bytes(const uint8_t* from) {
    return (f32x16){{(f32_part)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)load16(from)))}};
}

// Lane i is values[index[i] % 16].
INLINE f32x16 permute(f32x16 values, i32x16 index) {
    return (f32x16){{(f32_part)_mm512_permutexvar_ps((__m512i)index.part[0], (__m512)values.part[0])}};
}

// Sixteen unsigned bytes as integers.
INLINE i32x16 load_bytes_as_ints(const uint8_t* from) {
    return (i32x16){{(i32_part)_mm512_cvtepu8_epi32((__m128i)load16(from))}};
}

// Sixteen halves as floats.
INLINE f32x16 load_halves(const void* from) {
    return (f32x16){{(f32_part)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from))}};
}

// Sixteen bfloat16 numbers as floats.
INLINE f32x16 load_bfloats(const void* from) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
    return (f32x16){{(f32_part)_mm512_slli_epi32(wide, 16)}};
}

INLINE void store_halves(void* to, f32x16 v) {
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)v.part[0], _MM_FROUND_TO_NEAREST_INT));
}

// Stores the lowest byte of each integer.
INLINE void store_low_bytes(void* to, i32x16 v) {
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)v.part[0]));
}

// Stores the lower 16 bits of each integer.
INLINE void store_low_halves(void* to, i32x16 v) {
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)v.part[0]));
}
