// Layout of formats whose weights are points of a grid (IQ types): codes are levels + SHIFT, in the order of the
// weights.
//
// Macros from the compiler's command line (qgemm/cpu/native/libraries.py): GRID_WEIGHTS, weights of a point (8 or 4);
// GRID_POINTS, the points, each an integer whose bytes are its signed levels. The including header defines GROUPS and
// SHIFT.
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

// The points of 256 weights, as bytes in order.
typedef struct {
    grid_point point[SUPER / GRID_WEIGHTS];
} grid_points;

// Codes = levels + SHIFT, after negating the weights whose sign bit is set: bit i of byte j of `signs` belongs to
// weight 8 j + i.
INLINE void points_to_codes(u8x64 codes[4], const grid_points* points, const uint64_t signs[4]) {
    for (int v = 0; v < 4; ++v) {
        u8x64 levels = load64((const uint8_t*)points + 64 * v);
        if (signs) {
            const u8x64 minus = where_set(signs[v], 255);
            EACH_PART levels.part[i] = (levels.part[i] ^ minus.part[i]) - minus.part[i];
        }
        EACH_PART levels.part[i] += (u8_part){0} + SHIFT;
        codes[v] = levels;
    }
}

// Adds the eighth sign to each byte of seven: it makes the number of minuses even.
INLINE uint64_t add_parity_sign(uint64_t signs) {
    uint64_t folded = signs ^ signs >> 4;
    folded ^= folded >> 2;
    folded ^= folded >> 1;
    return signs | (folded & 0x0101010101010101) << 7;
}

// The signs of 64 weights, from two words whose low 28 bits are four times seven signs.
INLINE uint64_t unpack_signs(uint32_t first, uint32_t second) {
    uint64_t signs = 0;
    for (int i = 0; i < 4; ++i)
        signs |= (uint64_t)(first >> 7 * i & 127) << 8 * i | (uint64_t)(second >> 7 * i & 127) << (32 + 8 * i);
    return add_parity_sign(signs);
}

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
    uint8_t sc[16];
    memcpy(sc, &first, sizeof first), memcpy(sc + 8, &second, sizeof second);
    return mul_all(add_floats(mul_all(to_float(load_bytes_as_ints(sc)), 2), all_floats(1)), unit);
}
