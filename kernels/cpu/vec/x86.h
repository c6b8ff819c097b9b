// Functions that AVX-512 and AVX2 share. Included by avx512.h and avx2.h after they define add_halves.
#pragma once

#include "intrinsics.h"

// Conversions between IEEE half and float, subnormals included; float to half rounds to nearest, ties to even. Two
// halves arrive in one 32-bit word, eight in two 64-bit words.
INLINE float half_to_float(uint16_t half) { return _cvtsh_ss(half); }
INLINE uint16_t float_to_half(float value) { return (uint16_t)_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
INLINE f32x4 two_halves_to_floats(uint32_t both) { return (f32x4)_mm_cvtph_ps(_mm_cvtsi32_si128((int)both)); }
INLINE f32x8 halves_to_floats(uint64_t low, uint64_t high) {
    return (f32x8)_mm256_cvtph_ps(_mm_set_epi64x((int64_t)high, (int64_t)low));
}

// Zero-extends eight bytes to integers. An intrinsic, because GCC 12 splits __builtin_convertvector of eight bytes into
// scalar code.
INLINE i32x8 bytes_to_ints(uint64_t bytes) { return (i32x8)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)bytes)); }

// Sums all lanes by a fixed tree: the upper half is added to the lower one until one lane is left.
INLINE float reduce_add_eight(f32x8 v) {
    const __m256 eight = (__m256)v;
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

INLINE float reduce_add(f32x16 v) { return reduce_add_eight(add_halves(v)); }

// Lane i is values[index[i] % 8].
INLINE f32x8 permute_eight(f32x8 values, i32x8 index) {
    return (f32x8)_mm256_permutevar8x32_ps((__m256)values, (__m256i)index);
}

// Sums of adjacent lanes of the 16 lanes (low, high). Lanes 0 to 3 of the result hold the sums of lanes 0 to 3 and 8 to
// 11, lanes 4 to 7 the sums of lanes 4 to 7 and 12 to 15.
INLINE i32x8 pair_sums_8(i32x8 low, i32x8 high) {
    const __m256 a = (__m256)low, b = (__m256)high;
    return (i32x8)_mm256_shuffle_ps(a, b, 0x88) + (i32x8)_mm256_shuffle_ps(a, b, 0xdd);
}

// For each of low and high: its lower four lanes plus its upper four.
INLINE i32x8 quad_sums_8(i32x8 low, i32x8 high) {
    const __m256i a = (__m256i)low, b = (__m256i)high;
    return (i32x8)_mm256_permute2x128_si256(a, b, 0x20) + (i32x8)_mm256_permute2x128_si256(a, b, 0x31);
}

// Transposes 4 x 4 floats in place.
INLINE void transpose4(f32x4 rows[4]) {
    const __m128 a = (__m128)rows[0], b = (__m128)rows[1], c = (__m128)rows[2], d = (__m128)rows[3];
    const __m128 ab = _mm_unpacklo_ps(a, b), cd = _mm_unpacklo_ps(c, d);
    const __m128 ab_high = _mm_unpackhi_ps(a, b), cd_high = _mm_unpackhi_ps(c, d);
    rows[0] = (f32x4)_mm_movelh_ps(ab, cd), rows[1] = (f32x4)_mm_movehl_ps(cd, ab);
    rows[2] = (f32x4)_mm_movelh_ps(ab_high, cd_high), rows[3] = (f32x4)_mm_movehl_ps(cd_high, ab_high);
}

// Sets IEEE arithmetic (round to nearest, subnormals kept), whatever other libraries have set, and returns the previous
// mode.
INLINE uint64_t enter_ieee_mode(void) {
    const unsigned old = _mm_getcsr();
    _mm_setcsr(0x1f80);
    return old;
}

INLINE void restore_mode(uint64_t mode) { _mm_setcsr((unsigned)mode); }
