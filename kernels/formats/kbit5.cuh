// kbit5:  w = absmax * codebook[q],  q in 0..31.       Twin of qgemm/formats/kbit.py.
#pragma once

#include "../codebook.cuh"

template <int GROUPS>
struct kbit5 : Codebook<kbit5_fields<GROUPS>, kbit5_codebook> {};
