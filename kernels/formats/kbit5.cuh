// kbit5:  w = absmax * codebook[q],  q in 0..31.       Twin of qgemm/formats/kbit.py.
#pragma once

#include "codes/codebook.cuh"
#include "tiles/kbit5.cuh"

namespace qgemm {

template <int M16_TILES>
struct kbit5 : Codebook<kbit5_fields<M16_TILES>, kbit5_codebook> {};

}  // namespace qgemm
