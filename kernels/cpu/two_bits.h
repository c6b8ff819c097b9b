// Layout of two-bit codes (q2_k, q3_k, tq2_0): byte 32 h + j holds weight 128 h + 32 i + j in bits 2i and 2i + 1, and i
// is the number of the vector.
#pragma once

#define CODE_BITS 3  // upper bound
#include "unpacked.h"

#define ACCS 4
#define ACC_OF(vector) (vector)
#define WEIGHT_OF(v, i) (128 * ((i) / 32) + 32 * (v) + (i) % 32)
