// What AVX-512 and AVX2 have in common.
#pragma once

#include <immintrin.h>

INLINE f32x8 halves_to_floats(u16x8 halves) { return (f32x8)_mm256_cvtph_ps((__m128i)halves); }

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
