// q4_1:  w = d * q + m,  q in 0..15.       Twin of qgemm/formats/q4_1.py.
#pragma once

#include "codes/encoder.cuh"
#include "codes/half_scales.cuh"
#include "codes/nibbles.cuh"
#include "tiles/q4_1.cuh"

namespace qgemm {

template <int M16_TILES>
struct q4_1 : Nibbles<HalfMinimums<q4_1_fields<M16_TILES>>, 0> {
    using Encoder = AffineEncoder<q4_1_block, 15>;
};

}  // namespace qgemm
