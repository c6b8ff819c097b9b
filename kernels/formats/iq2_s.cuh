// iq2_s:  w = d * (2 sc + 1) / 8 * level, 1024 points of eight weights, sc in 0..15 a group of 16.
// Twin of qgemm/formats/iq2_s.py.
#pragma once

#include "codes/grid.cuh"
#include "codes/grid_scales.cuh"
#include "tiles/iq2_s.cuh"

namespace qgemm {

template <int M16_TILES>
struct iq2_s : GridLevels<SuperScales<NibbleScales<iq2_s_fields<M16_TILES>, -3>>, iq2_s_grid> {};

}  // namespace qgemm
