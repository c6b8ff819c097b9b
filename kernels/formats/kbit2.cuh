// kbit2:  w = absmax * codebook[q],  q in 0..3.       Twin of qgemm/formats/kbit.py.
#pragma once

#include "../codebook.cuh"

template <int GROUPS>
struct kbit2 : Codebook<kbit2_fields<GROUPS>, kbit2_codebook> {};
