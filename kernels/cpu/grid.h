// Formats whose weights are points of a grid, in the order of the weights. GROUPS: 8 of 32 weights, 16 of 16.
//
// Macros of the compiler's command line (qgemm/cpu/native/libraries.py): GRID_WEIGHTS of a point, 8 or 4; GRID_POINTS,
// their levels as signed bytes, a number of as many bytes each.
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

// The points of 256 weights.
typedef struct {
    grid_point of[SUPER / GRID_WEIGHTS];
} grid_points;

// Levels plus SHIFT. signs: bit i of byte j, whether weight 8 j + i is negative.
INLINE void codes_of_points(u8x64 codes[4], const grid_points* points, const uint64_t signs[4]) {
    for (int v = 0; v < 4; ++v) {
        u8x64 levels = load64((const uint8_t*)points + 64 * v);
        if (signs) {
            const u8x64 minus = where_set(signs[v], 255);
            EACH levels.part[i] = (levels.part[i] ^ minus.part[i]) - minus.part[i];
        }
        EACH levels.part[i] += (u8_part){0} + SHIFT;
        codes[v] = levels;
    }
}

// Eight times seven signs -> with the eighth, which makes the minuses even.
INLINE uint64_t with_parity(uint64_t signs) {
    uint64_t folded = signs ^ signs >> 4;
    folded ^= folded >> 2;
    folded ^= folded >> 1;
    return signs | (folded & 0x0101010101010101) << 7;
}

// The signs of two words that begin with those of four times eight weights.
INLINE uint64_t signs_of_words(uint32_t first, uint32_t second) {
    uint64_t signs = 0;
    for (int i = 0; i < 4; ++i)
        signs |= (uint64_t)(first >> 7 * i & 127) << 8 * i | (uint64_t)(second >> 7 * i & 127) << (32 + 8 * i);
    return with_parity(signs);
}

// Eight nibbles as bytes.
INLINE uint64_t bytes_of_nibbles(uint32_t nibbles) {
    uint64_t bytes = nibbles;
    bytes = (bytes | bytes << 16) & 0x0000ffff0000ffff;
    bytes = (bytes | bytes << 8) & 0x00ff00ff00ff00ff;
    return (bytes | bytes << 4) & 0x0f0f0f0f0f0f0f0f;
}

// unit * (2 sc + 1) of eight groups.
INLINE f32x8 odd_scales(float unit, uint64_t sc) { return (bytes_to_floats(sc) * 2 + 1) * unit; }

INLINE f32x16 sixteen_odd_scales(float unit, uint64_t first, uint64_t second) {
    uint8_t sc[16];
    memcpy(sc, &first, sizeof first), memcpy(sc + 8, &second, sizeof second);
    return mul_all(add_floats(mul_all(to_float(sixteen_ints(sc)), 2), all_floats(1)), unit);
}
