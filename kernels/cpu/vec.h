// Vectors of 64 bytes by the compiler's vector extensions, and by name the few instructions that differ between CPUs.
//
// A compiler splits a vector into what its CPU has: one zmm, two ymm, four NEON registers. Names of instructions stand
// in this file alone.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))

typedef uint8_t u8x8 __attribute__((vector_size(8)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x32 __attribute__((vector_size(32)));
typedef uint8_t u8x64 __attribute__((vector_size(64)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef int8_t i8x64 __attribute__((vector_size(64)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x16 __attribute__((vector_size(64)));

INLINE u8x16 load16(const void* from) {
    u8x16 found;
    memcpy(&found, from, sizeof found);
    return found;
}

INLINE u8x64 load64(const void* from) {
    u8x64 found;
    memcpy(&found, from, sizeof found);
    return found;
}

INLINE i8x64 load_codes(const int8_t* from) {
    i8x64 found;
    memcpy(&found, from, sizeof found);
    return found;
}

INLINE i32x16 load_ints(const int32_t* from) {
    i32x16 found;
    memcpy(&found, from, sizeof found);
    return found;
}

INLINE f32x16 load_floats(const float* from) {
    f32x16 found;
    memcpy(&found, from, sizeof found);
    return found;
}

// Sixteen bytes after sixteen.
INLINE u8x64 join(u8x16 a, u8x16 b, u8x16 c, u8x16 d) {
    const u8x32 low = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18,
                                              19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
    const u8x32 high = __builtin_shufflevector(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18,
                                               19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20,
                                   21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41,
                                   42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62,
                                   63);
}

INLINE f32x16 join_floats(f32x8 a, f32x8 b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

INLINE f32x16 to_float(i32x16 values) { return __builtin_convertvector(values, f32x16); }

// acc[i] + the dot product of bytes 4i .. 4i + 3 of codes, which are below 128 or, where CODES_128, any, with those of x.
INLINE i32x16 dot(i32x16 acc, u8x64 codes, i8x64 x) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, (__m512i)x);
#elif defined(__AVX2__)
    union {
        u8x64 all;
        __m256i half[2];
    } a = {codes};
    union {
        i8x64 all;
        __m256i half[2];
    } b = {x};
    union {
        i32x16 all;
        __m256i half[2];
    } sum = {acc};
    for (int i = 0; i < 2; ++i) {
#if defined(__AVXVNNI__)
        sum.half[i] = _mm256_dpbusd_avx_epi32(sum.half[i], a.half[i], b.half[i]);
#else  // sums of two products saturate for codes from 128 on: their high bit counts apart
        const __m256i ones = _mm256_set1_epi16(1), low = _mm256_and_si256(a.half[i], _mm256_set1_epi8(127));
        const __m256i high = _mm256_and_si256(_mm256_srli_epi16(a.half[i], 7), _mm256_set1_epi8(1));
        const __m256i of_low = _mm256_madd_epi16(_mm256_maddubs_epi16(low, b.half[i]), ones);
        const __m256i of_high = _mm256_madd_epi16(_mm256_maddubs_epi16(high, b.half[i]), _mm256_set1_epi16(128));
        sum.half[i] = _mm256_add_epi32(sum.half[i], _mm256_add_epi32(of_low, of_high));
#endif
    }
    return sum.all;
#else
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 4; ++j) acc[i] += (int)codes[4 * i + j] * (int)x[4 * i + j];
    return acc;
#endif
}

// Byte i of each sixteen: that byte of the sixteen of `table` whose number is index[i] % 16.
INLINE u8x64 lookup(u8x64 table, u8x64 index) {
#if defined(__AVX512BW__)
    return (u8x64)_mm512_shuffle_epi8((__m512i)table, (__m512i)index);
#elif defined(__AVX2__)
    union {
        u8x64 all;
        __m256i half[2];
    } t = {table}, i = {index};
    for (int j = 0; j < 2; ++j) t.half[j] = _mm256_shuffle_epi8(t.half[j], i.half[j]);
    return t.all;
#else
    u8x64 found;
    for (int i = 0; i < 64; ++i) found[i] = table[i / 16 * 16 + index[i] % 16];
    return found;
#endif
}

// values[number[i]] in lane i; numbers below 8 where `values` has eight groups twice over.
INLINE f32x16 spread(f32x16 values, i32x16 number) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_permutexvar_ps((__m512i)number, (__m512)values);
#elif defined(__AVX2__)
    union {
        f32x16 all;
        __m256 half[2];
    } v = {values}, found;
    union {
        i32x16 all;
        __m256i half[2];
    } n = {number};
    for (int i = 0; i < 2; ++i) {
        const __m256 low = _mm256_permutevar8x32_ps(v.half[0], n.half[i]);
        const __m256 high = _mm256_permutevar8x32_ps(v.half[1], n.half[i]);
        found.half[i] = _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(n.half[i], 28)));
    }
    return found.all;
#else
    f32x16 found;
    for (int i = 0; i < 16; ++i) found[i] = values[number[i]];
    return found;
#endif
}

// 2^exponent, for exponents from -126 to 127.
INLINE float power_of_two(int exponent) {
    union {
        uint32_t bits;
        float value;
    } found = {(uint32_t)(exponent + 127) << 23};
    return found.value;
}

// A half as float, also a subnormal one, whatever the rounding mode says of those.
INLINE float half_to_float(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    union {
        uint32_t bits;
        float value;
    } found = {rest << 13}, scale = {(254u - 15) << 23};
    found.value *= scale.value;  // 2^112
    if (rest >= 0x7c00) found.bits |= 0xffu << 23;
    found.bits |= sign;
    return found.value;
}

INLINE f32x8 halves_to_floats(u16x8 halves) {
#if defined(__F16C__)
    return (f32x8)_mm256_cvtph_ps((__m128i)halves);
#else
    f32x8 found;
    for (int i = 0; i < 8; ++i) found[i] = half_to_float(halves[i]);
    return found;
#endif
}

// The halves at the start of eight blocks, gathered in integer registers: single lanes would fill the shuffle port.
INLINE f32x8 halves_of_blocks(const uint8_t* blocks, int64_t size) {
    uint64_t words[2] = {0, 0};
    for (int i = 0; i < 8; ++i) {
        uint16_t half;
        memcpy(&half, blocks + i * size, sizeof half);
        words[i / 4] |= (uint64_t)half << 16 * (i % 4);
    }
    u16x8 halves;
    memcpy(&halves, words, sizeof halves);
    return halves_to_floats(halves);
}

// Eight bytes as numbers.
INLINE i32x8 bytes_to_ints(uint64_t bytes) {
    u8x8 found;
    memcpy(&found, &bytes, sizeof found);
    return __builtin_convertvector(found, i32x8);
}

INLINE f32x8 bytes_to_floats(uint64_t bytes) { return __builtin_convertvector(bytes_to_ints(bytes), f32x8); }

INLINE float sum_of(f32x16 v) {
    float sums[16];
    memcpy(sums, &v, sizeof sums);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
    return sums[0];
}

// The rounding mode of IEEE 754 without flushing of subnormals, whatever another library has set; what was set before.
INLINE unsigned ieee_mode(void) {
#if defined(__SSE__)
    const unsigned old = _mm_getcsr();
    _mm_setcsr(0x1f80);
    return old;
#else
    return 0;
#endif
}

INLINE void restore_mode(unsigned mode) {
#if defined(__SSE__)
    _mm_setcsr(mode);
#else
    (void)mode;
#endif
}

#define FILL8(v) {v, v, v, v, v, v, v, v}
#define FILL64(v)                                                                                    \
    {v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, \
     v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v}
INLINE u8x64 low_nibbles(u8x64 bytes) { return bytes & (u8x64)FILL64(15); }
INLINE u8x64 high_nibbles(u8x64 bytes) { return bytes >> 4; }
