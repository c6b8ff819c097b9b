// kbit3:  w = absmax * codebook[q],  q in 0..7.       Twin of qgemm/formats/kbit.py.
#pragma once

#include "../codebook.cuh"

template <int GROUPS>
struct kbit3 : Codebook<kbit3_fields<GROUPS>, kbit3_codebook> {};
