// What AVX-512 and AVX2 have in common.
#pragma once

#include <immintrin.h>

// Halves as floats, also subnormal ones: one, and eight in two words; a float as a half, to nearest, ties to even.
INLINE float half_to_float(uint16_t half) { return _cvtsh_ss(half); }
INLINE uint16_t float_to_half(float value) { return (uint16_t)_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
INLINE f32x4 two_halves_to_floats(uint32_t both) { return (f32x4)_mm_cvtph_ps(_mm_cvtsi32_si128((int)both)); }
INLINE f32x8 halves_to_floats(uint64_t low, uint64_t high) {
    return (f32x8)_mm256_cvtph_ps(_mm_set_epi64x((int64_t)high, (int64_t)low));
}

// Eight bytes as numbers: the compilers' own conversion takes them apart.
INLINE i32x8 bytes_to_ints(uint64_t bytes) { return (i32x8)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)bytes)); }

// The sum of eight numbers, halves of them added until one is left.
INLINE float sum_of_eight(f32x8 v) {
    const __m256 eight = (__m256)v;
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

INLINE float sum_of(f32x16 v) { return sum_of_eight(sum_of_halves(v)); }

// values[number[i] % 8] in lane i.
INLINE f32x8 spread_eight(f32x8 values, i32x8 number) {
    return (f32x8)_mm256_permutevar8x32_ps((__m256)values, (__m256i)number);
}

// Each two lanes' sum, of low: lanes 0 to 3 and of high: 8 to 11 in lanes 0 to 3, of 4 to 7 and 12 to 15 behind.
INLINE i32x8 pair_sums_of_eight(i32x8 low, i32x8 high) {
    const __m256 a = (__m256)low, b = (__m256)high;
    return (i32x8)_mm256_shuffle_ps(a, b, 0x88) + (i32x8)_mm256_shuffle_ps(a, b, 0xdd);
}

// Each eight lanes' sums of their halves.
INLINE i32x8 quad_sums_of_eight(i32x8 low, i32x8 high) {
    const __m256i a = (__m256i)low, b = (__m256i)high;
    return (i32x8)_mm256_permute2x128_si256(a, b, 0x20) + (i32x8)_mm256_permute2x128_si256(a, b, 0x31);
}

// Four rows of four numbers -> four columns.
INLINE void transpose4(f32x4 rows[4]) {
    const __m128 a = (__m128)rows[0], b = (__m128)rows[1], c = (__m128)rows[2], d = (__m128)rows[3];
    const __m128 ab = _mm_unpacklo_ps(a, b), cd = _mm_unpacklo_ps(c, d);
    const __m128 ab_high = _mm_unpackhi_ps(a, b), cd_high = _mm_unpackhi_ps(c, d);
    rows[0] = (f32x4)_mm_movelh_ps(ab, cd), rows[1] = (f32x4)_mm_movehl_ps(cd, ab);
    rows[2] = (f32x4)_mm_movelh_ps(ab_high, cd_high), rows[3] = (f32x4)_mm_movehl_ps(cd_high, ab_high);
}

// Rounding as IEEE 754 has it, without flushing of subnormals, whatever another library has set; what was set before.
INLINE uint64_t ieee_mode(void) {
    const unsigned old = _mm_getcsr();
    _mm_setcsr(0x1f80);
    return old;
}

INLINE void restore_mode(uint64_t mode) { _mm_setcsr((unsigned)mode); }
