// iq3_s:  w = d * (2 sc + 1) * level, 512 points of four weights, sc in 0..15 a group of 32.
// Twin of qgemm/formats/iq3_s.py.
#pragma once

#include "codes/grid.cuh"
#include "codes/grid_scales.cuh"
#include "tiles/iq3_s.cuh"

namespace qgemm {

template <int M16_TILES>
struct iq3_s : GridLevels<SuperScales<NibbleScales<iq3_s_fields<M16_TILES>, 0>>, iq3_s_grid> {};

}  // namespace qgemm
