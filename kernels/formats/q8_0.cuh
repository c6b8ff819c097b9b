// q8_0:  w = d * q,  q in -128..127.       Twin of qgemm/formats/q8_0.py.
#pragma once

#include "../encoder.cuh"
#include "../signed_bytes.cuh"

template <int M16_TILES>
struct q8_0 : SignedBytes<HalfScales<q8_0_fields<M16_TILES>>> {
    static constexpr bool HAS_MINIMUM = false;
    using Encoder = SignedEncoder<q8_0_block>;
};
