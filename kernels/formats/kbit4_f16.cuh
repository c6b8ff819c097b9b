// kbit4_f16:  w = absmax * codebook[q],  q in 0..15.       Twin of qgemm/formats/kbit.py.
#pragma once

#include "../codebook.cuh"

template <int GROUPS>
struct kbit4_f16 : Codebook<kbit4_f16_fields<GROUPS>, kbit4_f16_codebook> {};
