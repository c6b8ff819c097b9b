// iq2_xxs:  w = d * (2 sc + 1) / 8 * level, 256 points of eight weights, sc in 0..15 a group of 32.
// Twin of qgemm/formats/iq2_xxs.py.
#pragma once

#include "codes/grid.cuh"
#include "codes/grid_scales.cuh"
#include "tiles/iq2_xxs.cuh"

namespace qgemm {

template <int M16_TILES>
struct iq2_xxs : GridLevels<SuperScales<NibbleScales<iq2_xxs_fields<M16_TILES>, -3>>, iq2_xxs_grid> {};

}  // namespace qgemm
