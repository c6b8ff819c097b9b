// q8_1:  w = d * q,  q in -128..127.       Twin of qgemm/formats/q8_1.py.
#pragma once

#include "codes/encoder.cuh"
#include "codes/half_scales.cuh"
#include "codes/signed_bytes.cuh"
#include "tiles/q8_1.cuh"

namespace qgemm {

struct q8_1_encoder : SignedEncoder<q8_1_block> {
    using SignedEncoder::SignedEncoder;
    __device__ void write(q8_1_block& block, LaneCodes codes) const {
        SignedEncoder::write(block, codes);
        int sum = __dp4a(int(codes[0]), 0x01010101, __dp4a(int(codes[1]), 0x01010101, 0));
#pragma unroll
        for (int step = 1; step < BLOCK_LANES; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (block_lane() == 0) block.s = quantizer.half_sum(sum);
    }
};

template <int M16_TILES>
struct q8_1 : SignedBytes<HalfScales<q8_1_fields<M16_TILES>>> {
    using Encoder = q8_1_encoder;
};

}  // namespace qgemm
