// mxfp4:  w = 2^(e - 128) * v,  v twice the e2m1 number: 0, 1, 2, 3, 4, 6, 8, 12 and negative.
// Twin of qgemm/formats/mxfp4.py.
#pragma once

#include "codes/e2m1.cuh"
#include "codes/encoder.cuh"
#include "tiles/mxfp4.cuh"

namespace qgemm {

// 2^(e - 128). For e = 0 and 1 it is subnormal, with bits 2^21 and 2^22, and the second argument of max is the larger.
__device__ inline float power_of_two(int e) {
    return __int_as_float(max((e << 23) - (1 << 23), (e << 21) + (1 << 21)));
}

// floor(log2(largest)) - 2 + 127, 0 for zero, from the logarithm rounded to float. At most 91 places of a float below a
// power of two it rounds to that power's logarithm.
__device__ inline u8 exponent_of(float largest) {
    const u32 bits = __float_as_uint(largest);
    if (bits == 0) return 0;
    const bool near = bits < 1 << 23 || (~bits & 0x7fffff) < 128;
    return 125 + (near ? int(floorf(float(log2(double(largest))))) : int(bits >> 23) - 127);
}

struct mxfp4_encoder {
    static constexpr int MAGNITUDES[] = {0, 1, 2, 3, 4, 6, 8, 12};
    float largest;
    u8 e;
    float scale;
    float edges[7];  // between two magnitudes; ties go to the lower code

    __device__ mxfp4_encoder(LaneValues x)
        : largest(__uint_as_float(largest_of_block(x))), e(exponent_of(largest)), scale(power_of_two(e)) {
        // A level beyond float is infinite, and so is its edge: it is never the nearest.
#pragma unroll
        for (int j = 0; j < 7; ++j)
            edges[j] = __fadd_rn(__fmul_rn(__fmul_rn(MAGNITUDES[j], scale), 0.5f),
                                 __fmul_rn(__fmul_rn(MAGNITUDES[j + 1], scale), 0.5f));
    }
    __device__ bool holds() const { return !isinf(largest); }
    __device__ u32 code(float x) const {
        u32 code = 0;
#pragma unroll
        for (int j = 0; j < 7; ++j) code += fabsf(x) > edges[j];
        return x < 0 && code ? code + 8 : code;
    }
    __device__ float decode(u32 code) const {
        const float magnitude = float(__byte_perm(0x03020100, 0x0c080604, code & 7) & 0xff) * scale;
        return code & 8 ? -magnitude : magnitude;
    }
    __device__ void write(mxfp4_block& block, LaneCodes codes) const {
        write_nibbles(block, codes);
        if (block_lane() == 0) block.e = e;
    }
};

template <int M16_TILES>
struct mxfp4 : E2m1<mxfp4_fields<M16_TILES>> {
    static constexpr bool HAS_MINIMUM = false;
    using Encoder = mxfp4_encoder;

    __device__ float2 scale(int m16, int g, int block) const {
        const u32 e = *reinterpret_cast<const u32*>(this->e[m16][g]);  // both blocks
        return {power_of_two(e >> 16 * block & 0xff), power_of_two(e >> (16 * block + 8) & 0xff)};
    }
    __device__ float2 minimum(int, int, int) const { return {}; }
};

}  // namespace qgemm
