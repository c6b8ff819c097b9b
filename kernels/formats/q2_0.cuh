// q2_0:  w = d * (q - 1),  q in 0..3.       Twin of qgemm/formats/q2_0.py.
#pragma once

#include "codes/half_scales.cuh"
#include "codes/two_bits.cuh"
#include "tiles/q2_0.cuh"

namespace qgemm {

template <int M16_TILES>
struct q2_0 : TwoBits<HalfScales<q2_0_fields<M16_TILES>>, 1> {};

}  // namespace qgemm
