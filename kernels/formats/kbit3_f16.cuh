// kbit3_f16:  w = absmax * codebook[q],  q in 0..7.       Twin of qgemm/formats/kbit.py.
#pragma once

#include "codes/codebook.cuh"
#include "tiles/kbit3_f16.cuh"

namespace qgemm {

template <int M16_TILES>
struct kbit3_f16 : Codebook<kbit3_f16_fields<M16_TILES>, kbit3_f16_codebook> {};

}  // namespace qgemm
