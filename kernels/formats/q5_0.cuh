// q5_0:  w = d * (q - 16),  q in 0..31.       Twin of qgemm/formats/q5_0.py.
#pragma once

#include "codes/encoder.cuh"
#include "codes/half_scales.cuh"
#include "codes/overlapping.cuh"
#include "tiles/q5_0.cuh"

namespace qgemm {

template <int M16_TILES>
struct q5_0 : OverlappingCodes<HalfScales<q5_0_fields<M16_TILES>>, 5, 16> {
    using Encoder = SymmetricEncoder<q5_0_block, q5_0::ZERO>;
};

}  // namespace qgemm
