// Layout of formats whose weights are points of a grid (IQ types): codes are levels + SHIFT, in the order of the
// weights.
//
// Macros from the compiler's command line (qgemm/cpu/native/libraries.py): GRID_WEIGHTS, weights of a point (8 or 4);
// GRID_POINTS, the points, each an integer whose bytes are its signed levels. The including header defines GROUPS,
// SHIFT and POINT_NUMBER(block, i), the number in GRID of point i of a block.
#pragma once

#include "unpacked.h"

#define ACCS 4
#define ACC_OF(vector) (vector)
#define WEIGHT_OF(v, i) (64 * (v) + (i))
#if GROUPS == 8
#define LANES 8
#define LOW_GROUP(acc) (2 * (acc))
#define HIGH_GROUP(acc) (2 * (acc) + 1)
#else
#define LANES 4
#endif

#if GRID_WEIGHTS == 8
typedef uint64_t grid_point;
#else
typedef uint32_t grid_point;
#endif
static const grid_point GRID[] = GRID_POINTS;

// The levels of 256 weights, in order.
#if PART >= 32
// Points go from the table straight to registers: a load of 32 bytes or more would wait for their stores.
INLINE u8x16 sixteen_levels(const uint8_t* block, int i) {
#define POINT(j) GRID[(uint32_t)(POINT_NUMBER(block, 16 / GRID_WEIGHTS * i + (j)))]
#if GRID_WEIGHTS == 8
    u8x16 levels = join_words(POINT(0), POINT(1));
#else
    VECTOR(uint32_t, u32x4, 16);
    u8x16 levels = (u8x16)(u32x4){POINT(0), POINT(1), POINT(2), POINT(3)};
#endif
#undef POINT
    __asm__ volatile("" : "+x"(levels) : : "memory");
    return levels;
}

INLINE void load_grid_levels(u8x64 levels[4], const uint8_t* block) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v)
        levels[v] = join(sixteen_levels(block, 4 * v), sixteen_levels(block, 4 * v + 1),
                         sixteen_levels(block, 4 * v + 2), sixteen_levels(block, 4 * v + 3));
}
#else
INLINE void load_grid_levels(u8x64 levels[4], const uint8_t* block) {
    grid_point points[SUPER / GRID_WEIGHTS];
    for (int i = 0; i < SUPER / GRID_WEIGHTS; ++i) points[i] = GRID[POINT_NUMBER(block, i)];
    for (int v = 0; v < 4; ++v) levels[v] = load64((const uint8_t*)points + 64 * v);
}
#endif

INLINE void add_shift(u8x64 codes[4]) {
    for (int v = 0; v < 4; ++v) EACH_PART codes[v].part[i] += (u8_part){0} + SHIFT;
}

// Negates the levels whose byte of `minus` is 255; the others have 0.
INLINE u8x64 negate_where(u8x64 levels, u8x64 minus) {
    EACH_PART levels.part[i] = (levels.part[i] ^ minus.part[i]) - minus.part[i];
    return levels;
}

// Codes = levels + SHIFT, after negating the weights whose sign bit is set: bit i of byte j of `signs` belongs to
// weight 8 j + i.
INLINE void load_signed_codes(u8x64 codes[4], const uint8_t* block, const uint64_t signs[4]) {
    load_grid_levels(codes, block);
    for (int v = 0; v < 4; ++v) codes[v] = negate_where(codes[v], where_set(signs[v], 255));
    add_shift(codes);
}

#ifdef SEVEN_SIGNS
// Signs of formats with SEVEN_SIGNS(block, i): the first seven signs of weights 8 i to 8 i + 7, from bit 0 on; the
// eighth makes the number of minuses even.
#if PART >= 32
#define PARITY(n) (((n) ^ (n) >> 1 ^ (n) >> 2 ^ (n) >> 3 ^ (n) >> 4 ^ (n) >> 5 ^ (n) >> 6) & 1)
#define MASK_BYTE(n, i) (((n) >> (i) & 1ull) * 255 << 8 * (i))
#define MASK(n)                                                                                                  \
    (MASK_BYTE(n, 0) | MASK_BYTE(n, 1) | MASK_BYTE(n, 2) | MASK_BYTE(n, 3) | MASK_BYTE(n, 4) | MASK_BYTE(n, 5) | \
     MASK_BYTE(n, 6) | (PARITY(n) * 255ull << 56))
#define MASK_4(n) MASK(n), MASK((n) + 1), MASK((n) + 2), MASK((n) + 3)
#define MASK_16(n) MASK_4(n), MASK_4((n) + 4), MASK_4((n) + 8), MASK_4((n) + 12)
// Bytes of 255 for the minuses of eight weights, 0 for the others.
static const uint64_t SIGN_MASKS[128] = {MASK_16(0),  MASK_16(16), MASK_16(32), MASK_16(48),
                                         MASK_16(64), MASK_16(80), MASK_16(96), MASK_16(112)};

INLINE u8x16 sixteen_sign_masks(const uint8_t* block, int i) {
    u8x16 minus = join_words(SIGN_MASKS[SEVEN_SIGNS(block, 2 * i)], SIGN_MASKS[SEVEN_SIGNS(block, 2 * i + 1)]);
    __asm__ volatile("" : "+x"(minus) : : "memory");
    return minus;
}

INLINE void load_seven_sign_codes(u8x64 codes[4], const uint8_t* block) {
    load_grid_levels(codes, block);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v)
        codes[v] =
            negate_where(codes[v], join(sixteen_sign_masks(block, 4 * v), sixteen_sign_masks(block, 4 * v + 1),
                                        sixteen_sign_masks(block, 4 * v + 2), sixteen_sign_masks(block, 4 * v + 3)));
    add_shift(codes);
}
#else
INLINE void load_seven_sign_codes(u8x64 codes[4], const uint8_t* block) {
    uint64_t signs[4] = {0, 0, 0, 0};
#pragma GCC unroll 32
    for (int i = 0; i < 32; ++i) signs[i / 8] |= (uint64_t)SEVEN_SIGNS(block, i) << 8 * (i % 8);
    for (int v = 0; v < 4; ++v) {
        uint64_t folded = signs[v] ^ signs[v] >> 4;
        folded ^= folded >> 2;
        folded ^= folded >> 1;
        signs[v] |= (folded & 0x0101010101010101) << 7;
    }
    load_signed_codes(codes, block, signs);
}
#endif
#endif

// Eight nibbles, one in each byte.
INLINE uint64_t spread_nibbles(uint32_t nibbles) {
    uint64_t bytes = nibbles;
    bytes = (bytes | bytes << 16) & 0x0000ffff0000ffff;
    bytes = (bytes | bytes << 8) & 0x00ff00ff00ff00ff;
    return (bytes | bytes << 4) & 0x0f0f0f0f0f0f0f0f;
}

// unit * (2 sc + 1) for eight groups.
INLINE f32x8 odd_scales(float unit, uint64_t sc) { return (bytes_to_floats(sc) * 2 + 1) * unit; }

INLINE f32x16 odd_scales_16(float unit, uint64_t first, uint64_t second) {
    return join_floats(odd_scales(unit, first), odd_scales(unit, second));
}
