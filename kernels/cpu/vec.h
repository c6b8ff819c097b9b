// Vectors of 64 bytes in as many parts as the CPU needs: one of 64 bytes (AVX-512), two of 32 (AVX2), four of 16.
//
// What the compiler's vector extensions can say is said so, part by part; instructions stand by name here and in numbers.h alone.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#ifndef CODE_BITS  // a format says 8 if it has codes from 128 on
#define CODE_BITS 7
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define PART 64
#elif defined(__AVX2__)
#define PART 32
#else
#define PART 16
#endif
#define PARTS (64 / PART)
#define EACH _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; ++i)

#define VECTOR(type, name, bytes) typedef type name __attribute__((vector_size(bytes)))
VECTOR(uint8_t, u8x8, 8);
VECTOR(uint8_t, u8x16, 16);
VECTOR(int8_t, i8x8, 8);
VECTOR(uint16_t, u16x8, 16);
VECTOR(int32_t, i32x8, 32);
VECTOR(float, f32x8, 32);
VECTOR(uint8_t, u8_part, PART);
VECTOR(int8_t, i8_part, PART);
VECTOR(int32_t, i32_part, PART);
VECTOR(float, f32_part, PART);

typedef struct {
    u8_part part[PARTS];
} u8x64;
typedef struct {
    i8_part part[PARTS];
} i8x64;
typedef struct {
    i32_part part[PARTS];
} i32x16;
typedef struct {
    f32_part part[PARTS];
} f32x16;

INLINE u8x8 load8(const void* from) {
    u8x8 found;
    memcpy(&found, from, sizeof found);
    return found;
}

INLINE u8x16 load16(const void* from) {
    u8x16 found;
    memcpy(&found, from, sizeof found);
    return found;
}

// Part by part: a copy of the whole would go through memory.
#define LOAD(type, name)                                                                 \
    INLINE type name(const void* from) {                                                 \
        type found;                                                                      \
        EACH memcpy(&found.part[i], (const char*)from + PART * i, sizeof found.part[i]); \
        return found;                                                                    \
    }
LOAD(u8x64, load64)
LOAD(i8x64, load_codes)
LOAD(i32x16, load_ints)
LOAD(f32x16, load_floats)

#define EIGHT(n) n, n, n, n, n, n, n, n

// ---- bytes

// Sixteen bytes after sixteen.
INLINE u8x64 join(u8x16 a, u8x16 b, u8x16 c, u8x16 d) {
    u8x64 found;
#if PART == 16
    found.part[0] = a, found.part[1] = b, found.part[2] = c, found.part[3] = d;
#else
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)a), (__m128i)b, 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)c), (__m128i)d, 1);
#if PART == 32
    found.part[0] = (u8_part)low, found.part[1] = (u8_part)high;
#else
    found.part[0] = (u8_part)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
#endif
#endif
    return found;
}

INLINE u8x64 and_all(u8x64 v, uint8_t value) {
    EACH v.part[i] &= (u8_part){0} + value;
    return v;
}

INLINE u8x64 xor_all(u8x64 v, uint8_t value) {
    EACH v.part[i] ^= (u8_part){0} + value;
    return v;
}

INLINE u8x64 or_both(u8x64 a, u8x64 b) {
    EACH a.part[i] |= b.part[i];
    return a;
}

INLINE u8x64 add_all(u8x64 v, uint8_t value) {
    EACH v.part[i] += (u8_part){0} + value;
    return v;
}

INLINE u8x64 low_nibbles(u8x64 v) { return and_all(v, 15); }

INLINE u8x64 high_nibbles(u8x64 v) {
    EACH v.part[i] >>= 4;
    return v;
}

INLINE u8x64 as_high_nibbles(u8x64 v) {
    EACH v.part[i] <<= 4;
    return v;
}

// `value` in each byte that shares a bit with the mask's.
INLINE u8x64 where_bits(u8x64 v, u8x64 mask, uint8_t value) {
    EACH v.part[i] = (u8_part)((v.part[i] & mask.part[i]) != 0) & ((u8_part){0} + value);
    return v;
}

// Byte i of each sixteen: that byte of the sixteen of `table` whose number is index[i] % 16.
INLINE u8x64 lookup(u8x64 table, u8x64 index) {
#if PART == 64
    table.part[0] = (u8_part)_mm512_shuffle_epi8((__m512i)table.part[0], (__m512i)index.part[0]);
#elif PART == 32
    EACH table.part[i] = (u8_part)_mm256_shuffle_epi8((__m256i)table.part[i], (__m256i)index.part[i]);
#else
    EACH table.part[i] = __builtin_shuffle(table.part[i], index.part[i]);
#endif
    return table;
}

// ---- integers

// acc[i] + the dot product of bytes 4i .. 4i + 3 of codes, unsigned, with those of x, signed.
INLINE i32x16 dot(i32x16 acc, u8x64 codes, i8x64 x) {
#if PART == 64
    acc.part[0] = (i32_part)_mm512_dpbusd_epi32((__m512i)acc.part[0], (__m512i)codes.part[0], (__m512i)x.part[0]);
#elif PART == 32
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
#else
    EACH for (int lane = 0; lane < 4; ++lane) for (int j = 4 * lane; j < 4 * lane + 4; ++j) acc.part[i][lane] +=
        (int)codes.part[i][j] * (int)x.part[i][j];
#endif
    return acc;
}

INLINE i32x16 add_ints(i32x16 a, i32x16 b) {
    EACH a.part[i] += b.part[i];
    return a;
}

// A word of four bytes, or a number, in all lanes.
INLINE i32x16 all_ints(int32_t value) {
    i32x16 found;
    EACH found.part[i] = (i32_part){0} + value;
    return found;
}

INLINE i8x64 all_words(const int8_t* word) {
    int32_t value;
    memcpy(&value, word, sizeof value);
    i8x64 found;
    EACH found.part[i] = (i8_part)((i32_part){0} + value);
    return found;
}

INLINE f32x16 all_floats(float value) {
    f32x16 found;
    EACH found.part[i] = (f32_part){0} + value;
    return found;
}

// 256 a + b.
INLINE i32x16 after(i32x16 a, i32x16 b) {
    EACH a.part[i] = (a.part[i] << 8) + b.part[i];
    return a;
}

// Of each four lanes of a and b: the sums of a's lanes 0 and 2, 1 and 3, then of b's.
INLINE i32x16 half_sums(i32x16 a, i32x16 b) {
#if PART == 64
    const __m512i one = (__m512i)a.part[0], two = (__m512i)b.part[0];
    a.part[0] = (i32_part)_mm512_unpacklo_epi64(one, two) + (i32_part)_mm512_unpackhi_epi64(one, two);
#elif PART == 32
    EACH {
        const __m256i one = (__m256i)a.part[i], two = (__m256i)b.part[i];
        a.part[i] = (i32_part)_mm256_unpacklo_epi64(one, two) + (i32_part)_mm256_unpackhi_epi64(one, two);
    }
#else
    EACH a.part[i] = __builtin_shufflevector(a.part[i], b.part[i], 0, 1, 4, 5) +
                     __builtin_shufflevector(a.part[i], b.part[i], 2, 3, 6, 7);
#endif
    return a;
}

// Of each four lanes of a and b: the sums of a's lanes 0 and 1, 2 and 3, then of b's.
INLINE i32x16 pair_sums(i32x16 a, i32x16 b) {
#if PART == 64
    const __m512 one = (__m512)a.part[0], two = (__m512)b.part[0];
    a.part[0] = (i32_part)_mm512_shuffle_ps(one, two, 0x88) + (i32_part)_mm512_shuffle_ps(one, two, 0xdd);
#elif PART == 32
    EACH a.part[i] = (i32_part)_mm256_hadd_epi32((__m256i)a.part[i], (__m256i)b.part[i]);
#else
    EACH a.part[i] = __builtin_shufflevector(a.part[i], b.part[i], 0, 2, 4, 6) +
                     __builtin_shufflevector(a.part[i], b.part[i], 1, 3, 5, 7);
#endif
    return a;
}

// Each lane's sum with its neighbour's.
INLINE i32x16 with_neighbours(i32x16 v) {
#if PART == 64
    v.part[0] += (i32_part)_mm512_shuffle_epi32((__m512i)v.part[0], _MM_PERM_CDAB);
#elif PART == 32
    EACH v.part[i] += (i32_part)_mm256_shuffle_epi32((__m256i)v.part[i], 0xb1);
#else
    EACH v.part[i] += __builtin_shufflevector(v.part[i], v.part[i], 1, 0, 3, 2);
#endif
    return v;
}

// Each four lanes' sums with the neighbouring four's.
INLINE i32x16 with_next_quads(i32x16 v) {
#if PART == 64
    const __m512i all = (__m512i)v.part[0];
    v.part[0] += (i32_part)_mm512_shuffle_i32x4(all, all, _MM_PERM_CDAB);
#elif PART == 32
    EACH v.part[i] += (i32_part)_mm256_permute2x128_si256((__m256i)v.part[i], (__m256i)v.part[i], 1);
#else
    v.part[0] = v.part[1] = v.part[0] + v.part[1], v.part[2] = v.part[3] = v.part[2] + v.part[3];
#endif
    return v;
}

// ---- floats

INLINE f32x16 to_float(i32x16 v) {
    f32x16 found;
    EACH found.part[i] = __builtin_convertvector(v.part[i], f32_part);
    return found;
}

INLINE f32x16 mul(f32x16 a, f32x16 b) {
    EACH a.part[i] *= b.part[i];
    return a;
}

INLINE f32x16 mul_all(f32x16 v, float value) {
    EACH v.part[i] *= value;
    return v;
}

// acc + a * b, rounded once where the CPU can.
INLINE f32x16 mul_add(f32x16 acc, f32x16 a, f32x16 b) {
    EACH acc.part[i] += a.part[i] * b.part[i];
    return acc;
}

INLINE float sum_of(f32x16 v) {
    float sums[16];
    memcpy(sums, &v, sizeof sums);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
    return sums[0];
}

INLINE f32x16 join_floats(f32x8 a, f32x8 b) {
    f32x16 found;
#if PART == 64
    found.part[0] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#elif PART == 32
    found.part[0] = a, found.part[1] = b;
#else
    memcpy(&found, &a, sizeof a), memcpy((char*)&found + sizeof a, &b, sizeof b);
#endif
    return found;
}

// Eight numbers, and zeros behind them.
INLINE f32x16 with_zeros(f32x8 v) { return join_floats(v, (f32x8){0}); }

// values[number[i]] in lane i.
INLINE f32x16 spread(f32x16 values, i32x16 number) {
    f32x16 found = values;
#if PART == 64
    found.part[0] = (f32_part)_mm512_permutexvar_ps((__m512i)number.part[0], (__m512)values.part[0]);
#elif PART == 32
    EACH {
        const __m256i n = (__m256i)number.part[i];
        const __m256 low = _mm256_permutevar8x32_ps((__m256)values.part[0], n);
        const __m256 high = _mm256_permutevar8x32_ps((__m256)values.part[1], n);
        found.part[i] = (f32_part)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(n, 28)));
    }
#else
    float from[16];
    memcpy(from, &values, sizeof from);
    EACH for (int lane = 0; lane < 4; ++lane) found.part[i][lane] = from[number.part[i][lane]];
#endif
    return found;
}
