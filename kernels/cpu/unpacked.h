// The interface between a format's header (formats/NAME.h) and the products: 256 weights of a row of W as integer
// codes.
//
// w = scale * (code - ZERO - SHIFT) + minimum, for codes 0 to 2^CODE_BITS - 1.
//
// codes              four vectors of 64 unsigned codes; slot i of vector v holds weight WEIGHT_OF(v, i)
// scale, minimum     one float for each group, in order, followed by zeros
//
// Macros that a format's header defines (or takes from the header of its layout):
//
// WEIGHT_OF(v, i)    the number, 0 to 255, of the weight in slot i of vector v
// RUN                slots in a row that hold consecutive weights of one group (default 16)
// GROUPS             groups of 256 weights: 8 (of 32 weights) or 16 (of 16)
// ACCS, ACC_OF(v)    number of integer accumulators, and the accumulator to which vector v is added
// LANES              consecutive lanes of an accumulator that belong to one group: 2, 4 or 8 (a lane sums four slots)
// LOW_GROUP(acc), HIGH_GROUP(acc)   with 8 lanes a group: the groups in the low and the high half of an accumulator
// QUAD_GROUP(acc, quad)             with 4 lanes a group and 16 groups: the group of four lanes of an accumulator
// SHIFT              added by the header to make codes unsigned; the products subtract it exactly, in integers
// ZERO               the format's own zero point
// MINIMUM            1 if the format has minimums
//
// A header defines unpack(blocks), which returns all three. If each byte of the codes depends on the same byte of RAW
// vectors, it defines three steps instead: load_raw(bytes, blocks) loads these vectors, raw_to_codes(codes, bytes)
// computes the codes, load_scales(w, blocks) the scales and minimums. Tiles of 16 rows then transpose RAW vectors a row
// instead of four.
//
// Optional macros and their functions:
//
// LANE_SCALES        a lane keeps one block in all four vectors; load_lane_scales(&scale, &minimum, blocks) has the
//                    scale and minimum of each lane. Integer sums of lanes then become floats at once (lane_rows.h),
//                    and LANES, LOW_GROUP and the like are not needed.
// LANE_CODES         besides, load_lane_codes(codes, blocks) makes codes that count LANE_FACTOR(lane) each
// OWN_UNPACK         besides RAW: the header defines an unpack(blocks) that is faster than its three steps
// SCALE_SHORTS       scales of 16 rows, one row a lane, from pairs of bytes (interleaved.h)
#pragma once

#include "block_numbers.h"
#include "row_panels.h"

typedef struct {
    u8x64 codes[4];
    f32x16 scale, minimum;
} unpacked;

// The low and high nibbles of two vectors.
INLINE void split_nibbles(u8x64 codes[4], const u8x64 bytes[2]) {
    codes[0] = low_nibbles(bytes[0]), codes[1] = high_nibbles(bytes[0]);
    codes[2] = low_nibbles(bytes[1]), codes[3] = high_nibbles(bytes[1]);
}

// The four two-bit fields of each byte.
INLINE void split_two_bits(u8x64 codes[4], u8x64 bytes) {
    codes[0] = and_all(bytes, 3), codes[1] = and_all(shift_right(bytes, 2), 3);
    codes[2] = and_all(shift_right(bytes, 4), 3), codes[3] = and_all(shift_right(bytes, 6), 3);
}

#if defined(LEVELS) && defined(SHIFT)
// Looks up nibbles in a codebook of 16 levels, the macro LEVELS, plus `shift`.
INLINE void lookup_shifted(u8x64 codes[4], const u8x64 bytes[2], const int shift) {
    const u8x16 levels = (u8x16)LEVELS + (uint8_t)shift;
    const u8x64 table = join(levels, levels, levels, levels);
    split_nibbles(codes, bytes);
    codes[0] = lookup(table, codes[0]), codes[1] = lookup(table, codes[1]);
    codes[2] = lookup(table, codes[2]), codes[3] = lookup(table, codes[3]);
}

INLINE void lookup_nibbles(u8x64 codes[4], const u8x64 bytes[2]) { lookup_shifted(codes, bytes, SHIFT); }
#endif
