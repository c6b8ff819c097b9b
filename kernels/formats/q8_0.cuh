// q8_0:  w = d * q,  q in -128..127.       Twin of qgemm/formats/q8_0.py.
#pragma once

#include "codes/encoder.cuh"
#include "codes/half_scales.cuh"
#include "codes/signed_bytes.cuh"
#include "tiles/q8_0.cuh"

namespace qgemm {

template <int M16_TILES>
struct q8_0 : SignedBytes<HalfScales<q8_0_fields<M16_TILES>>> {
    using Encoder = SignedEncoder<q8_0_block>;
};

}  // namespace qgemm
