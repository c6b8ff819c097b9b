// q8_1:  w = d * q,  q in -128..127.       Twin of qgemm/formats/q8_1.py.
#pragma once

#include "../encoder.cuh"
#include "../fragment.cuh"

struct q8_1_encoder : SignedEncoder<q8_1_block> {
    using SignedEncoder::SignedEncoder;
    __device__ void write(q8_1_block& block, LaneCodes codes) const {
        SignedEncoder::write(block, codes);
        int sum = __dp4a(int(codes[0]), 0x01010101, __dp4a(int(codes[1]), 0x01010101, 0));
#pragma unroll
        for (int step = 1; step < BLOCK_LANES; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (block_lane() == 0) block.s = __high2half(quantizer.scale_and_sum(sum));
    }
};

template <int GROUPS>
struct q8_1 : HalfScales<q8_1_fields<GROUPS>> {
    using Codes = q8_1_codes;
    static constexpr int ZERO = 0;
    static constexpr bool HAS_MINIMUM = false;
    using Encoder = q8_1_encoder;

    static __device__ Fragment fragment(const Codes& codes, int step) {
        return byte_fragment(codes.qs[2 * step], codes.qs[2 * step + 1]);
    }
    // Codes above -RAW_ZERO as halves, times 2^-RAW_EXPONENT.
    static constexpr int RAW_ZERO = 128, RAW_EXPONENT = 24, RAW_SHIFT = 0;
    static __device__ Fragment raw(const Codes& codes, int step) {
        return raw_bytes(codes.qs[2 * step], codes.qs[2 * step + 1]);
    }
    static __device__ Bytes bytes(const Codes& codes, int step) { return {codes.qs[2 * step], codes.qs[2 * step + 1]}; }
};
