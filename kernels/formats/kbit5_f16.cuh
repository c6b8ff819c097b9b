// kbit5_f16:  w = absmax * codebook[q],  q in 0..31.       Twin of qgemm/formats/kbit.py.
#pragma once

#include "codes/codebook.cuh"
#include "tiles/kbit5_f16.cuh"

namespace qgemm {

template <int M16_TILES>
struct kbit5_f16 : Codebook<kbit5_f16_fields<M16_TILES>, kbit5_f16_codebook> {};

}  // namespace qgemm
