// iq2_xs:  w = d * (2 sc + 1) / 8 * level, 512 points of eight weights, sc in 0..15 a group of 16.
// Twin of qgemm/formats/iq2_xs.py.
#pragma once

#include "codes/grid.cuh"
#include "codes/grid_scales.cuh"
#include "tiles/iq2_xs.cuh"

namespace qgemm {

template <int M16_TILES>
struct iq2_xs : GridLevels<SuperScales<NibbleScales<iq2_xs_fields<M16_TILES>, -3>>, iq2_xs_grid> {};

}  // namespace qgemm
