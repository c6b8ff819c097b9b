// Vectors of 64 bytes, split into the parts that a CPU's registers hold: one part of 64 bytes (AVX-512), two of 32
// (AVX2) or four of 16 (64-bit ARM).
//
// Everything that the vector extensions of GCC and clang can express is written here, part by part. Only the files of
// vec/ call intrinsics, one file for each instruction set.
//
// Macro: CODE_BITS, the number of bits of a format's unsigned codes. dot() is cheaper for 7 bits (the default) than for
// 8, and AVX2 without VNNI is faster still the fewer they are.
#pragma once

#include <stdint.h>
#include <string.h>

#ifndef CODE_BITS
#define CODE_BITS 7
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define PART 64
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define PART 32
#elif defined(__aarch64__)
#define PART 16
#else
#error "qgemm: products are for CPUs with AVX2, FMA and F16C, and for 64-bit ARM"
#endif
#define PARTS (64 / PART)
#define EACH_PART _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; ++i)

#define VECTOR(type, name, bytes) typedef type name __attribute__((vector_size(bytes)))
VECTOR(uint8_t, u8x8, 8);
VECTOR(uint8_t, u8x16, 16);
VECTOR(uint64_t, u64x2, 16);
VECTOR(int32_t, i32x8, 32);
VECTOR(float, f32x8, 32);
VECTOR(float, f32x4, 16);
VECTOR(uint8_t, u8_part, PART);
VECTOR(uint16_t, u16_part, PART);
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
    u8x8 result;
    memcpy(&result, from, sizeof result);
    return result;
}

INLINE u8x16 load16(const void* from) {
    u8x16 result;
    memcpy(&result, from, sizeof result);
    return result;
}

INLINE u8x16 join_words(uint64_t low, uint64_t high) { return (u8x16)(u64x2){low, high}; }

// Each part is copied by itself, since GCC moves a copy of the whole struct through memory.
#define LOAD(type, name)                                                                        \
    INLINE type name(const void* from) {                                                        \
        type result;                                                                            \
        EACH_PART memcpy(&result.part[i], (const char*)from + PART * i, sizeof result.part[i]); \
        return result;                                                                          \
    }
LOAD(u8x64, load64)
LOAD(i8x64, load_codes)
LOAD(i32x16, load_ints)
LOAD(f32x16, load_floats)

#if PART == 64
#include "vec/avx512.h"
#elif PART == 32
#include "vec/avx2.h"
#else
#include "vec/neon.h"
#endif

#define REPEAT_8(n) n, n, n, n, n, n, n, n

// ---- bytes

INLINE u8x64 all_bytes(uint8_t value) {
    u8x64 result;
    EACH_PART result.part[i] = (u8_part){0} + value;
    return result;
}

INLINE u8x64 and_all(u8x64 v, uint8_t value) {
    EACH_PART v.part[i] &= (u8_part){0} + value;
    return v;
}

INLINE u8x64 xor_all(u8x64 v, uint8_t value) {
    EACH_PART v.part[i] ^= (u8_part){0} + value;
    return v;
}

INLINE u8x64 or_bytes(u8x64 a, u8x64 b) {
    EACH_PART a.part[i] |= b.part[i];
    return a;
}

INLINE u8x64 low_nibbles(u8x64 v) { return and_all(v, 15); }

INLINE u8x64 shift_right(u8x64 v, int bits) {
    EACH_PART v.part[i] >>= bits;
    return v;
}

// Thirty-two bytes from memory twice: as they are in the low half, shifted right in the high half.
INLINE u8x64 repeat_shifted(const uint8_t* from, int bits) {
    u8x64 v = join_halves(from, from);
    static const uint8_t UPPER[64] = {REPEAT_8(0),   REPEAT_8(0),   REPEAT_8(0),   REPEAT_8(0),
                                      REPEAT_8(255), REPEAT_8(255), REPEAT_8(255), REPEAT_8(255)};
    const u8x64 upper = load64(UPPER), shifted = shift_right(v, bits);
    EACH_PART v.part[i] = (shifted.part[i] & upper.part[i]) | (v.part[i] & ~upper.part[i]);
    return v;
}

// By 16 bits: GCC shifts bytes left by `bits` additions.
INLINE u8x64 shift_left(u8x64 v, int bits) {
    EACH_PART v.part[i] = (u8_part)((u16_part)v.part[i] << bits) & ((u8_part){0} + (uint8_t)(255 << bits));
    return v;
}

#if PART < 64
// Byte i is the number of thresholds (low, high) that byte i of v exceeds: 0, 1 or 2.
INLINE u8x64 count_above(u8x64 v, uint8_t low, uint8_t high) {
    EACH_PART v.part[i] = -((u8_part)(v.part[i] > low) + (u8_part)(v.part[i] > high));
    return v;
}

INLINE u8x64 high_nibbles(u8x64 v) { return shift_right(v, 4); }

// Byte i is `value` where v and mask share a bit in byte i, else 0.
INLINE u8x64 where_bits(u8x64 v, u8x64 mask, uint8_t value) {
    EACH_PART v.part[i] = (u8_part)((v.part[i] & mask.part[i]) != 0) & ((u8_part){0} + value);
    return v;
}

// Byte i is `value` where bit i of `bits` is set, else 0.
INLINE u8x64 where_set(uint64_t bits, uint8_t value) {
    static const uint8_t BIT[8] = {1, 2, 4, 8, 16, 32, 64, 128};
    static const uint8_t BYTE[64] = {REPEAT_8(0), REPEAT_8(1), REPEAT_8(2), REPEAT_8(3),
                                     REPEAT_8(4), REPEAT_8(5), REPEAT_8(6), REPEAT_8(7)};
    uint64_t bit;
    memcpy(&bit, BIT, sizeof bit);
    const u8x16 all = join_words(bits, 0), mask = join_words(bit, bit);
    return where_bits(lookup(join(all, all, all, all), load64(BYTE)), join(mask, mask, mask, mask), value);
}
#endif

#if PART < 64
// Adds `value` to byte i of v where bit i of `bits` is set. v must be zero in the bits of `value`.
INLINE u8x64 or_where_set(u8x64 v, uint64_t bits, uint8_t value) { return or_bytes(v, where_set(bits, value)); }

#if PART < 32
// Transposes 16 x 16 words in place; row i is v[i * step].
static __attribute__((noinline, unused)) void transpose16(u8x64* v, int step) {
    float words[16][16];
    for (int row = 0; row < 16; row += 4)
        for (int column = 0; column < 16; column += 4) {
            f32x4 square[4];
            for (int j = 0; j < 4; ++j) memcpy(&square[j], (float*)&v[(row + j) * step] + column, sizeof square[j]);
            transpose4(square);
            for (int j = 0; j < 4; ++j) memcpy(&words[column + j][row], &square[j], sizeof square[j]);
        }
    for (int column = 0; column < 16; ++column) memcpy(&v[column * step], words[column], sizeof v[0]);
}
#endif
#endif

// ---- integers

// One integer, or one word of four bytes, in all lanes.
INLINE i32x16 all_ints(int32_t value) {
    i32x16 result;
    EACH_PART result.part[i] = (i32_part){0} + value;
    return result;
}

INLINE i8x64 all_words(const int8_t* word) {
    int32_t value;
    memcpy(&value, word, sizeof value);
    i8x64 result;
    EACH_PART result.part[i] = (i8_part)((i32_part){0} + value);
    return result;
}

INLINE i32x16 add_ints(i32x16 a, i32x16 b) {
    EACH_PART a.part[i] += b.part[i];
    return a;
}

INLINE i32x16 or_ints(i32x16 a, i32x16 b) {
    EACH_PART a.part[i] |= b.part[i];
    return a;
}

// (v >> first) & mask.
INLINE i32x16 bit_field(i32x16 v, int first, int32_t mask) {
    EACH_PART v.part[i] = v.part[i] >> first & mask;
    return v;
}

INLINE i32x16 mul_ints(i32x16 v, int32_t value) {
    EACH_PART v.part[i] *= value;
    return v;
}

// Bit patterns of floats without their signs. As integers they compare like magnitudes, with NaN above all others.
INLINE i32x16 magnitude_bits(i32x16 v) {
    EACH_PART v.part[i] &= 0x7fffffff;
    return v;
}

INLINE i32x16 max_ints(i32x16 a, i32x16 b) {
    EACH_PART {
        const i32_part more = a.part[i] > b.part[i];
        a.part[i] = (a.part[i] & more) | (b.part[i] & ~more);
    }
    return a;
}

INLINE void store_ints(int32_t* to, i32x16 v) { EACH_PART memcpy((char*)to + PART * i, &v.part[i], sizeof v.part[i]); }

// Byte j of each word, zero-extended to an integer.
INLINE i32x16 byte_of_words(u8x64 words, int j) {
    i32x16 result;
    EACH_PART result.part[i] = (i32_part)words.part[i] >> 8 * j & 255;
    return result;
}

INLINE i32x16 shift_ints(i32x16 v, int bits) {
    EACH_PART v.part[i] <<= bits;
    return v;
}

#if PART < 64
INLINE int32_t reduce_add_ints(i32x16 v) {
    int32_t lanes[16], sum = 0;
    store_ints(lanes, v);
    for (int i = 0; i < 16; ++i) sum += lanes[i];
    return sum;
}

INLINE int32_t reduce_max_ints(i32x16 v) {
    int32_t lanes[16], largest = INT32_MIN;
    store_ints(lanes, v);
    for (int i = 0; i < 16; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
    return largest;
}
#endif

INLINE i32x16 sub_ints(i32x16 a, i32x16 b) {
    EACH_PART a.part[i] -= b.part[i];
    return a;
}

INLINE i32x16 shift_ints_right(i32x16 v, int bits) {
    EACH_PART v.part[i] >>= bits;
    return v;
}

// The lowest byte of each integer, sign-extended.
INLINE i32x16 sign_extend_byte(i32x16 v) { return shift_ints_right(shift_ints(v, 24), 24); }

// ---- floats

INLINE f32x16 all_floats(float value) {
    f32x16 result;
    EACH_PART result.part[i] = value - (f32_part){0};  // 0 + value would cost an addition, because it turns -0 into 0
    return result;
}

INLINE void store_floats(void* to, f32x16 v) { EACH_PART memcpy((char*)to + PART * i, &v.part[i], sizeof v.part[i]); }

// Keeps the compiler from contracting the multiplication that made v and a later addition into one fma: v is rounded
// before it is added.
INLINE f32x16 no_contraction(f32x16 v) {
#if PART == 16
    EACH_PART __asm__("" : "+w"(v.part[i]));
#elif PART == 32
    EACH_PART __asm__("" : "+x"(v.part[i]));
#else
    EACH_PART __asm__("" : "+v"(v.part[i]));
#endif
    return v;
}

INLINE f32x16 to_float(i32x16 v) {
    f32x16 result;
    EACH_PART result.part[i] = __builtin_convertvector(v.part[i], f32_part);
    return result;
}

// Rounds to the nearest integer, ties to even. Magnitudes from 2^23 on and NaN give 0.
INLINE i32x16 nearest_ints(f32x16 v) {
    i32x16 result;
    EACH_PART {
        const i32_part sign = (i32_part)v.part[i] & INT32_MIN;
        const f32_part whole = (f32_part)(sign | 0x4b000000), size = (f32_part)((i32_part)v.part[i] & INT32_MAX);
        const i32_part in_range = size < 0x1p23f;
        result.part[i] = __builtin_convertvector((v.part[i] + whole) - whole, i32_part) & in_range;
    }
    return result;
}

// Rounds to the nearest integer, ties away from zero: adds the float just below 1/2 with the sign of v, then truncates.
INLINE i32x16 round_half_away(f32x16 v) {
    i32x16 result;
    EACH_PART {
        const f32_part half = (f32_part)(((i32_part)v.part[i] & INT32_MIN) | 0x3effffff);
        result.part[i] = __builtin_convertvector(v.part[i] + half, i32_part);
    }
    return result;
}

INLINE f32x16 mul(f32x16 a, f32x16 b) {
    EACH_PART a.part[i] *= b.part[i];
    return a;
}

INLINE f32x16 mul_all(f32x16 v, float value) {
    EACH_PART v.part[i] *= value;
    return v;
}

// acc + a * b, fused where the CPU has fma.
INLINE f32x16 mul_add(f32x16 acc, f32x16 a, f32x16 b) {
    EACH_PART acc.part[i] += a.part[i] * b.part[i];
    return acc;
}

INLINE f32x16 add_floats(f32x16 a, f32x16 b) {
    EACH_PART a.part[i] += b.part[i];
    return a;
}

// Looks up a table of 32 floats, given as two halves: lane i gets entry index[i].
INLINE f32x16 permute_two_tables(f32x16 low, f32x16 high, i32x16 index) {
    low = permute(low, index), high = permute(high, index);
    EACH_PART {
        const i32_part second = (index.part[i] & 16) != 0;
        low.part[i] = (f32_part)(((i32_part)high.part[i] & second) | ((i32_part)low.part[i] & ~second));
    }
    return low;
}
