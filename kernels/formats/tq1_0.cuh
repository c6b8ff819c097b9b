// tq1_0:  w = d * (q - 1),  q in 0..2.       Twin of qgemm/formats/tq1_0.py.
#pragma once

#include "codes/half_scales.cuh"
#include "codes/ternary.cuh"
#include "tiles/tq1_0.cuh"

namespace qgemm {

template <int M16_TILES>
struct tq1_0 : Ternary<HalfScales<tq1_0_fields<M16_TILES>>> {};

}  // namespace qgemm
