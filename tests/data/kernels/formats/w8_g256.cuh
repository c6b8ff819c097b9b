// w8_g256:  w = d * (q - 128),  q in 0..255, d a group of 256.       Twin of tests/formats_of_tests.py.
#pragma once

#include "codes/half_scales.cuh"
#include "codes/signed_bytes.cuh"
#include "tiles/w8_g256.cuh"

namespace qgemm {

template <int M16_TILES>
struct w8_g256 : SignedBytes<HalfScales<w8_g256_fields<M16_TILES>>> {
    // Codes of a block are level + 128 already, as in a tile.
    static __device__ void to_tile(w8_g256_codes&) {}
    static __device__ void from_tile(w8_g256_codes&) {}
};

}  // namespace qgemm
