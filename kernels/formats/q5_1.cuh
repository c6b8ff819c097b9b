// q5_1:  w = d * q + m,  q in 0..31.       Twin of qgemm/formats/q5_1.py.
#pragma once

#include "codes/encoder.cuh"
#include "codes/half_scales.cuh"
#include "codes/overlapping.cuh"
#include "tiles/q5_1.cuh"

namespace qgemm {

template <int M16_TILES>
struct q5_1 : OverlappingCodes<HalfMinimums<q5_1_fields<M16_TILES>>, 5, 0> {
    using Encoder = AffineEncoder<q5_1_block, 31>;
};

}  // namespace qgemm
