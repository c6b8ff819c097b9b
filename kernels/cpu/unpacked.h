// What a format makes of 256 weights of a row.
//
// codes: four vectors of 64 unsigned codes in the order of WEIGHT_OF(vector, slot), the number of a slot's weight;
// every RUN slots (16 unless said) have weights that follow each other, of one group. Vectors
// whose sums may be added share an accumulator, ACC_OF(vector) of ACCS; of its lanes, each the sum of four slots, every
// LANES (2, 4 or 8) in a row are one group of weights: LOW_GROUP(acc) and HIGH_GROUP, or QUAD_GROUP(acc, quad).
// scale, minimum: of each of GROUPS (8 of 32 weights, 16 of 16) in order, zero behind them:
// w = scale * (code - ZERO - SHIFT) + minimum. SHIFT makes codes unsigned and is taken away exactly; ZERO is the
// format's.
//
// SCALES_OF_LANES: a lane has one block in all four vectors, whose scale and minimum are scales_of_lanes(&scale,
// &minimum, blocks); codes_by_lanes, of CODES_OF_LANES, makes codes of which each counts FACTOR_OF_LANE. Then sums of
// lanes become floats at once (lane_rows.h), so that neither LANES nor the groups of an accumulator are asked for.
//
// A header has unpack(blocks). Or, where each byte of the codes comes of the same byte of RAW vectors, the steps of it:
// bytes_of(bytes, blocks) loads those vectors, codes_of(codes, bytes) makes the codes, scales_of(&found, blocks) scale
// and minimum. Then tiles of rows move RAW vectors a row, not four. SCALES_OF_TILE: it has scales_of_tile(scale,
// minimum, blocks) as well, scales and minimums of sixteen rows, a row a lane.
#pragma once

#include "numbers.h"
#include "panel_rows.h"

typedef struct {
    u8x64 codes[4];
    f32x16 scale, minimum;
} unpacked;

// Low and high nibbles of two vectors.
INLINE void nibbles_of(u8x64 codes[4], const u8x64 bytes[2]) {
    codes[0] = low_nibbles(bytes[0]), codes[1] = high_nibbles(bytes[0]);
    codes[2] = low_nibbles(bytes[1]), codes[3] = high_nibbles(bytes[1]);
}

// The four pairs of bits of each byte.
INLINE void two_bits_of(u8x64 codes[4], u8x64 bytes) {
    codes[0] = and_all(bytes, 3), codes[1] = and_all(shift_right(bytes, 2), 3);
    codes[2] = and_all(shift_right(bytes, 4), 3), codes[3] = and_all(shift_right(bytes, 6), 3);
}

#ifdef LEVELS_PLUS_SHIFT
// What nibbles stand for in a codebook of bytes.
INLINE void levels_of_nibbles(u8x64 codes[4], const u8x64 bytes[2]) {
    const u8x16 levels = LEVELS_PLUS_SHIFT;
    const u8x64 table = join(levels, levels, levels, levels);
    nibbles_of(codes, bytes);
    codes[0] = lookup(table, codes[0]), codes[1] = lookup(table, codes[1]);
    codes[2] = lookup(table, codes[2]), codes[3] = lookup(table, codes[3]);
}
#endif
