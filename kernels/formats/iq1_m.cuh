// iq1_m:  w = d * (2 sc + 1) / 8 * level, 4096 points of eight weights, sc in 0..7 a group of 16.
// Twin of qgemm/formats/iq1_m.py.
#pragma once

#include "codes/grid.cuh"
#include "codes/grid_scales.cuh"
#include "tiles/iq1_m.cuh"

namespace qgemm {

template <int M16_TILES>
struct iq1_m : GridLevels<SuperScales<PlaneScales<iq1_m_fields<M16_TILES>, -3>>, iq1_m_grid> {};

}  // namespace qgemm
