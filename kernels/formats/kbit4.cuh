// kbit4:  w = absmax * codebook[q],  q in 0..15.       Twin of qgemm/formats/kbit.py.
#pragma once

#include "codes/codebook.cuh"
#include "tiles/kbit4.cuh"

namespace qgemm {

template <int M16_TILES>
struct kbit4 : Codebook<kbit4_fields<M16_TILES>, kbit4_codebook> {};

}  // namespace qgemm
