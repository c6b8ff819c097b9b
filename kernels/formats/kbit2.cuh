// kbit2:  w = absmax * codebook[q],  q in 0..3.       Twin of qgemm/formats/kbit.py.
#pragma once

#include "codes/codebook.cuh"
#include "tiles/kbit2.cuh"

namespace qgemm {

template <int M16_TILES>
struct kbit2 : Codebook<kbit2_fields<M16_TILES>, kbit2_codebook> {};

}  // namespace qgemm
