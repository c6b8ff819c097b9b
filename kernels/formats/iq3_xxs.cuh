// iq3_xxs:  w = d * (2 sc + 1) / 4 * level, 256 points of four weights, sc in 0..15 a group of 32.
// Twin of qgemm/formats/iq3_xxs.py.
#pragma once

#include "codes/grid.cuh"
#include "codes/grid_scales.cuh"
#include "tiles/iq3_xxs.cuh"

namespace qgemm {

template <int M16_TILES>
struct iq3_xxs : GridLevels<SuperScales<NibbleScales<iq3_xxs_fields<M16_TILES>, -2>>, iq3_xxs_grid> {};

}  // namespace qgemm
