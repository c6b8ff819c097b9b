// q5_0:  w = d * (q - 16),  q in 0..31.       Twin of qgemm/formats/q5_0.py.
#pragma once

#include "../encoder.cuh"
#include "../overlapping.cuh"

template <int M16_TILES>
struct q5_0 : FiveBits<HalfScales<q5_0_fields<M16_TILES>>, 16> {
    static constexpr bool HAS_MINIMUM = false;
    using Encoder = SymmetricEncoder<q5_0_block, q5_0::ZERO>;
};
