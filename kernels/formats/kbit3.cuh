// kbit3:  w = absmax * codebook[q],  q in 0..7.       Twin of qgemm/formats/kbit.py.
#pragma once

#include "codes/codebook.cuh"
#include "tiles/kbit3.cuh"

namespace qgemm {

template <int M16_TILES>
struct kbit3 : Codebook<kbit3_fields<M16_TILES>, kbit3_codebook> {};

}  // namespace qgemm
