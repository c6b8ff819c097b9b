// q5_k:  w = d * sc * q - dmin * m,  q in 0..31, sc and m in 0..63 a group of 32.
// Twin of qgemm/formats/q5_k.py.
#pragma once

#include "codes/k_quant_encoder.cuh"
#include "codes/overlapping.cuh"
#include "codes/six_bit_scales.cuh"
#include "tiles/q5_k.cuh"

namespace qgemm {

template <int M16_TILES>
struct q5_k : OverlappingCodes<SixBitScales<q5_k_fields<M16_TILES>>, 5, 0> {
    template <bool WEIGHTED>
    using GroupEncoder = AffineGroups<Q5KKind, WEIGHTED>;
};

}  // namespace qgemm
