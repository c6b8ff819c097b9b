// A block of quantized activations as ggml lays it out. Twin of qgemm/formats/q8_1.py.
#pragma once

#include "types.cuh"

struct q8_1_block {
    half d, s;  // scale; d * sum(q)
    signed char qs[32];
};
static_assert(sizeof(q8_1_block) == 36, "q8_1_block differs from its dtype");
