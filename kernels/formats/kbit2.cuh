// kbit2:  w = absmax * codebook[q],  q in 0..3.       Twin of qgemm/formats/kbit.py.
#pragma once

#include "../codebook.cuh"

template <int M16_TILES>
struct kbit2 : Codebook<kbit2_fields<M16_TILES>, kbit2_codebook> {};
