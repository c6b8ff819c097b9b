// Vectors of 64 bytes in as many parts as the CPU needs: one of 64 bytes (AVX-512), two of 32 (AVX2), four of 16.
//
// What the compiler's vector extensions can say is said so, part by part; the files of vec/ alone name instructions.
#pragma once

#include <stdint.h>
#include <string.h>

#ifndef CODE_BITS  // a format says 8 if it has codes from 128 on, and may say how few others need
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
#define EACH _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; ++i)

#define VECTOR(type, name, bytes) typedef type name __attribute__((vector_size(bytes)))
VECTOR(uint8_t, u8x8, 8);
VECTOR(uint8_t, u8x16, 16);
VECTOR(uint64_t, u64x2, 16);
VECTOR(int32_t, i32x8, 32);
VECTOR(float, f32x8, 32);
VECTOR(float, f32x4, 16);
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

INLINE u8x16 two_words(uint64_t low, uint64_t high) { return (u8x16)(u64x2){low, high}; }

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

#if PART == 64
#include "vec/avx512.h"
#elif PART == 32
#include "vec/avx2.h"
#else
#include "vec/neon.h"
#endif

#define EIGHT(n) n, n, n, n, n, n, n, n

// ---- bytes

INLINE u8x64 all_bytes(uint8_t value) {
    u8x64 found;
    EACH found.part[i] = (u8_part){0} + value;
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

INLINE u8x64 low_nibbles(u8x64 v) { return and_all(v, 15); }

INLINE u8x64 shift_right(u8x64 v, int bits) {
    EACH v.part[i] >>= bits;
    return v;
}

// The same thirty-two bytes twice, the second time shifted right.
INLINE u8x64 halves_apart(const uint8_t* from, int bits) {
    u8x64 v = join_halves(from, from);
    static const uint8_t UPPER[64] = {EIGHT(0),   EIGHT(0),   EIGHT(0),   EIGHT(0),
                                      EIGHT(255), EIGHT(255), EIGHT(255), EIGHT(255)};
    const u8x64 upper = load64(UPPER), shifted = shift_right(v, bits);
    EACH v.part[i] = (shifted.part[i] & upper.part[i]) | (v.part[i] & ~upper.part[i]);
    return v;
}

INLINE u8x64 shift_left(u8x64 v, int bits) {
    EACH v.part[i] <<= bits;
    return v;
}

#if PART < 64
// How many of two numbers each byte is above.
INLINE u8x64 count_above(u8x64 v, uint8_t low, uint8_t high) {
    EACH v.part[i] = -((u8_part)(v.part[i] > low) + (u8_part)(v.part[i] > high));
    return v;
}

INLINE u8x64 high_nibbles(u8x64 v) { return shift_right(v, 4); }

// `value` in each byte that shares a bit with the mask's.
INLINE u8x64 where_bits(u8x64 v, u8x64 mask, uint8_t value) {
    EACH v.part[i] = (u8_part)((v.part[i] & mask.part[i]) != 0) & ((u8_part){0} + value);
    return v;
}

// `value` in each byte whose bit is set, bit i for byte i.
INLINE u8x64 where_set(uint64_t bits, uint8_t value) {
    static const uint8_t BIT[8] = {1, 2, 4, 8, 16, 32, 64, 128};
    static const uint8_t BYTE[64] = {EIGHT(0), EIGHT(1), EIGHT(2), EIGHT(3), EIGHT(4), EIGHT(5), EIGHT(6), EIGHT(7)};
    uint64_t bit;
    memcpy(&bit, BIT, sizeof bit);
    const u8x16 all = two_words(bits, 0), mask = two_words(bit, bit);
    return where_bits(lookup(join(all, all, all, all), load64(BYTE)), join(mask, mask, mask, mask), value);
}
#endif

#if PART < 64
// The same, of a vector that has zeros in those bits.
INLINE u8x64 or_where_set(u8x64 v, uint64_t bits, uint8_t value) { return or_both(v, where_set(bits, value)); }

// Sixteen rows of sixteen words, every `step` vectors -> columns.
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

// ---- integers

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

INLINE i32x16 add_ints(i32x16 a, i32x16 b) {
    EACH a.part[i] += b.part[i];
    return a;
}

INLINE i32x16 or_ints(i32x16 a, i32x16 b) {
    EACH a.part[i] |= b.part[i];
    return a;
}

// The bits of a mask, from bit `first` on.
INLINE i32x16 bits_of(i32x16 v, int first, int32_t mask) {
    EACH v.part[i] = v.part[i] >> first & mask;
    return v;
}

INLINE i32x16 mul_ints(i32x16 v, int32_t value) {
    EACH v.part[i] *= value;
    return v;
}

// Bits of floats without their signs: they compare like magnitudes, NaN above all.
INLINE i32x16 magnitude_bits(i32x16 v) {
    EACH v.part[i] &= 0x7fffffff;
    return v;
}

INLINE i32x16 larger_ints(i32x16 a, i32x16 b) {
    EACH {
        const i32_part more = a.part[i] > b.part[i];
        a.part[i] = (a.part[i] & more) | (b.part[i] & ~more);
    }
    return a;
}

INLINE void store_ints(int32_t* to, i32x16 v) { EACH memcpy((char*)to + PART * i, &v.part[i], sizeof v.part[i]); }

// Byte j of each word of four.
INLINE i32x16 byte_of_words(u8x64 words, int j) {
    i32x16 found;
    EACH found.part[i] = (i32_part)words.part[i] >> 8 * j & 255;
    return found;
}

INLINE i32x16 shift_ints(i32x16 v, int bits) {
    EACH v.part[i] <<= bits;
    return v;
}

#if PART < 64
INLINE int32_t sum_of_ints(i32x16 v) {
    int32_t lanes[16], sum = 0;
    store_ints(lanes, v);
    for (int i = 0; i < 16; ++i) sum += lanes[i];
    return sum;
}

INLINE int32_t largest_of_ints(i32x16 v) {
    int32_t lanes[16], largest = INT32_MIN;
    store_ints(lanes, v);
    for (int i = 0; i < 16; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
    return largest;
}
#endif

INLINE i32x16 sub_ints(i32x16 a, i32x16 b) {
    EACH a.part[i] -= b.part[i];
    return a;
}

INLINE i32x16 shift_ints_right(i32x16 v, int bits) {
    EACH v.part[i] >>= bits;
    return v;
}

// The lowest byte of each number, signed.
INLINE i32x16 low_byte(i32x16 v) { return shift_ints_right(shift_ints(v, 24), 24); }

// ---- floats

INLINE f32x16 all_floats(float value) {
    f32x16 found;
    EACH found.part[i] = value - (f32_part){0};  // not 0 + value, which is work: it makes 0 of -0
    return found;
}

INLINE void put_floats(void* to, f32x16 v) { EACH memcpy((char*)to + PART * i, &v.part[i], sizeof v.part[i]); }

// The number that v is rounded to: no multiplication before it becomes part of an addition behind.
INLINE f32x16 rounded_first(f32x16 v) {
#if PART == 16
    EACH __asm__("" : "+w"(v.part[i]));
#elif PART == 32
    EACH __asm__("" : "+x"(v.part[i]));
#else
    EACH __asm__("" : "+v"(v.part[i]));
#endif
    return v;
}

INLINE f32x16 to_float(i32x16 v) {
    f32x16 found;
    EACH found.part[i] = __builtin_convertvector(v.part[i], f32_part);
    return found;
}

// To nearest, halves to even, of numbers below 2^23; 0 for others.
INLINE i32x16 nearest_ints(f32x16 v) {
    i32x16 found;
    EACH {
        const i32_part sign = (i32_part)v.part[i] & INT32_MIN;
        const f32_part whole = (f32_part)(sign | 0x4b000000), size = (f32_part)((i32_part)v.part[i] & INT32_MAX);
        const i32_part known = size < 0x1p23f;
        found.part[i] = __builtin_convertvector((v.part[i] + whole) - whole, i32_part) & known;
    }
    return found;
}

// To nearest, halves away from zero: the number before 1/2 is added.
INLINE i32x16 rounded_away(f32x16 v) {
    i32x16 found;
    EACH {
        const f32_part half = (f32_part)(((i32_part)v.part[i] & INT32_MIN) | 0x3effffff);
        found.part[i] = __builtin_convertvector(v.part[i] + half, i32_part);
    }
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

INLINE f32x16 add_floats(f32x16 a, f32x16 b) {
    EACH a.part[i] += b.part[i];
    return a;
}

// Of two tables of 16 numbers after each other: number i of 32 in lane i.
INLINE f32x16 spread_of_two(f32x16 low, f32x16 high, i32x16 number) {
    low = spread(low, number), high = spread(high, number);
    EACH {
        const i32_part second = (number.part[i] & 16) != 0;
        low.part[i] = (f32_part)(((i32_part)high.part[i] & second) | ((i32_part)low.part[i] & ~second));
    }
    return low;
}
