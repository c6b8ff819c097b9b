// iq1_s:  w = d * (2 sc + 1) / 8 * (8 level + 1 or - 1), 2048 points of eight weights, sc in 0..7 a group of 32.
// Twin of qgemm/formats/iq1_s.py.
#pragma once

#include "codes/grid.cuh"
#include "codes/grid_scales.cuh"
#include "tiles/iq1_s.cuh"

namespace qgemm {

template <int M16_TILES>
struct iq1_s : GridLevels<DeltaScales<iq1_s_fields<M16_TILES>, -3>, iq1_s_grid> {};

}  // namespace qgemm
