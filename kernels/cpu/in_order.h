// Vectors of 64 codes in the order of their weights: each has two groups of 32, and sums of its own.
#pragma once

#include "unpacked.h"

#define ACCS 4
#define ACC_OF(vector) (vector)
#define LANES 8
#define GROUPS 8
#define LOW_GROUP(acc) (2 * (acc))
#define HIGH_GROUP(acc) (2 * (acc) + 1)
#define WEIGHT_OF(v, i) (64 * (v) + (i))
