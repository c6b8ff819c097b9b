// q4_0:  w = d * (q - 8),  q in 0..15.       Twin of qgemm/formats/q4_0.py.
#pragma once

#include "codes/encoder.cuh"
#include "codes/half_scales.cuh"
#include "codes/nibbles.cuh"
#include "tiles/q4_0.cuh"

namespace qgemm {

template <int M16_TILES>
struct q4_0 : Nibbles<HalfScales<q4_0_fields<M16_TILES>>, 8> {
    using Encoder = SymmetricEncoder<q4_0_block, 8>;
};

}  // namespace qgemm
