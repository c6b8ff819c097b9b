// kbit4:  w = absmax * codebook[q],  q in 0..15.       Twin of qgemm/formats/kbit.py.
#pragma once

#include "../codebook.cuh"

template <int M16_TILES>
struct kbit4 : Codebook<kbit4_fields<M16_TILES>, kbit4_codebook> {};
