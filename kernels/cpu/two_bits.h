// Codes of two bits: byte 32 h + j of 64 has in bits 2i and 2i + 1 that of weight 128 h + 32 i + j, which is
// of vector i.
#pragma once

#define CODE_BITS 3  // at most
#include "unpacked.h"

#define ACCS 4
#define ACC_OF(vector) (vector)
#define WEIGHT_OF(v, i) (128 * ((i) / 32) + 32 * (v) + (i) % 32)
