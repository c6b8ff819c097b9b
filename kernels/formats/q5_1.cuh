// q5_1:  w = d * q + m,  q in 0..31.       Twin of qgemm/formats/q5_1.py.
#pragma once

#include "../encoder.cuh"
#include "../overlapping.cuh"

template <int M16_TILES>
struct q5_1 : FiveBits<HalfMinimums<q5_1_fields<M16_TILES>>, 0> {
    static constexpr bool HAS_MINIMUM = true;
    using Encoder = AffineEncoder<q5_1_block, 31>;
};
