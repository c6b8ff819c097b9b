// q6_0:  w = d * (q - 32),  q in 0..63.       Twin of tests/formats_of_tests/q6_0.py.
#pragma once

#include "codes/encoder.cuh"
#include "codes/half_scales.cuh"
#include "codes/overlapping.cuh"
#include "tiles/q6_0.cuh"

namespace qgemm {

// As formats of four and five bits, but that the high two bits of weights j, j + 16, j + 8 and j + 24 share a byte.
struct q6_0_encoder : SymmetricEncoder<q6_0_block, 32> {
    using SymmetricEncoder::SymmetricEncoder;

    __device__ void write(q6_0_block& block, LaneCodes codes) const {
        write_nibbles(block, codes);
        const int lane = block_lane(), place = lane % 2 * 4 + lane / 2 * 2;
#pragma unroll
        for (int i = 0; i < LANE_VALUES / 4; ++i) {
            u32 high = (codes[i] >> 4 & 0x03030303) << place;
#pragma unroll
            for (int step = 1; step < BLOCK_LANES; step *= 2) high |= __shfl_xor_sync(~0u, high, step);
            if (lane == 0) store_word<q6_0_block>(block.qh + 4 * i, high);
        }
        if (lane == 0) block.d = d;
    }
};

template <int M16_TILES>
struct q6_0 : OverlappingCodes<HalfScales<q6_0_fields<M16_TILES>>, 6, 32> {
    using Encoder = q6_0_encoder;
};

}  // namespace qgemm
