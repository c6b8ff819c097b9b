// q4_k:  w = d * sc * q - dmin * m,  q in 0..15, sc and m in 0..63 a group of 32.
// Twin of qgemm/formats/q4_k.py.
#pragma once

#include "codes/k_quant_encoder.cuh"
#include "codes/nibbles.cuh"
#include "codes/six_bit_scales.cuh"
#include "tiles/q4_k.cuh"

namespace qgemm {

template <int M16_TILES>
struct q4_k : Nibbles<SixBitScales<q4_k_fields<M16_TILES>>, 0> {
    template <bool WEIGHTED>
    using GroupEncoder = AffineGroups<Q4KKind, WEIGHTED>;
};

}  // namespace qgemm
