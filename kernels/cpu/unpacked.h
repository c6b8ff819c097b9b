// What a format makes of 256 weights of a row.
//
// codes: four vectors of 64 unsigned codes in the order of WEIGHT_OF(vector, slot), the number of a slot's weight; every RUN
// slots (16 unless said) have weights that follow each other, of one group. Vectors
// whose sums may be added share an accumulator, ACC_OF(vector) of ACCS; of its lanes, each the sum of four slots, every
// LANES (2, 4 or 8) in a row are one group of weights: LOW_GROUP(acc) and HIGH_GROUP, or QUAD_GROUP(acc, quad).
// scale, minimum: of each of GROUPS (8 of 32 weights, 16 of 16) in order, zero behind them:
// w = scale * (code - ZERO - SHIFT) + minimum. SHIFT makes codes unsigned and is taken away exactly; ZERO is the format's.
#pragma once

#include "numbers.h"

#define SUPER 256  // weights that are unpacked at a time

typedef struct {
    u8x64 codes[4];
    f32x16 scale, minimum;
} unpacked;
