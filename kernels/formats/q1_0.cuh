// q1_0:  w = d * (2 q - 1),  q in 0..1.       Twin of qgemm/formats/q1_0.py.
#pragma once

#include "codes/half_scales.cuh"
#include "codes/one_bit.cuh"
#include "tiles/q1_0.cuh"

namespace qgemm {

template <int M16_TILES>
struct q1_0 : PlusMinusOne<HalfScales<q1_0_fields<M16_TILES>>> {};

}  // namespace qgemm
