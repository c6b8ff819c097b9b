// q3_0:  w = d * (q - 4),  q in 0..7.       Twin of tests/formats_of_tests/q3_0.py.
#pragma once

#include "codes/encoder.cuh"
#include "codes/half_scales.cuh"
#include "codes/two_bits.cuh"
#include "tiles/q3_0.cuh"

namespace qgemm {

// The low two bits of weights j, j + 8, j + 16 and j + 24, one of each lane, share a byte.
struct q3_0_encoder : SymmetricEncoder<q3_0_block, 4> {
    using SymmetricEncoder::SymmetricEncoder;

    __device__ void write(q3_0_block& block, LaneCodes codes) const {
        const int lane = block_lane();
#pragma unroll
        for (int i = 0; i < LANE_VALUES / 4; ++i) {
            u32 low = (codes[i] & 0x03030303) << 2 * lane;
#pragma unroll
            for (int step = 1; step < BLOCK_LANES; step *= 2) low |= __shfl_xor_sync(~0u, low, step);
            if (lane == 0) store_word<q3_0_block>(block.qs + 4 * i, low);
        }
        block.qh[lane] = bit_plane<2>(codes);
        if (lane == 0) block.d = d;
    }
};

template <int M16_TILES>
struct q3_0 : ThreeBits<HalfScales<q3_0_fields<M16_TILES>>, 4> {
    using Encoder = q3_0_encoder;
};

}  // namespace qgemm
