// iq4_nl:  w = d * value(q),  q in 0..15.       Twin of qgemm/formats/iq4_nl.py.
#pragma once

#include "codes/encoder.cuh"
#include "fragment.cuh"
#include "codes/half_scales.cuh"
#include "codes/signed_bytes.cuh"
#include "tiles/iq4_nl.cuh"

namespace qgemm {

// The value of q, plus 128, is byte q of these: codes 0 to 7, then 8 to 15.
constexpr u32 IQ4_NL_LOW[] = {0x3f2d1801, 0x766a5d4f}, IQ4_NL_HIGH[] = {0xa6998d81, 0xf1d9c5b5};

// Four codes in the lower half of a word -> their values plus 128, as bytes. Three bits of a code are a selector of
// prmt; the fourth says which of the two tables it is for.
__device__ inline u32 iq4_nl_values(u32 codes) {
    const u32 low = __byte_perm(IQ4_NL_LOW[0], IQ4_NL_LOW[1], codes & 0x7777);
    const u32 high = __byte_perm(IQ4_NL_HIGH[0], IQ4_NL_HIGH[1], codes & 0x7777);
    return __byte_perm(low, high, 0x3210 | (codes & 0x8888) >> 1);
}

struct iq4_nl_encoder {
    static constexpr float LEAST = 1e-15f;  // blocks with no larger magnitude are zeros to ggml
    static constexpr int STEPS = 7;         // on either side
    float exact, inverse;
    half d;
    float scale;

    // The sums over a block of x^2 * value * x and of x^2 * value * value, in the order of the weights.
    struct Sums {
        float products = 0, norms = 0;

        __device__ Sums(LaneValues x, float inverse) {
            float values[LANE_VALUES];
#pragma unroll
            for (int j = 0; j < LANE_VALUES; ++j) values[j] = value(nearest(__fmul_rn(inverse, x[j])));
#pragma unroll
            for (int lane = 0; lane < BLOCK_LANES; ++lane) {
#pragma unroll
                for (int j = 0; j < LANE_VALUES; ++j) {
                    const float weighted = __fmul_rn(__fmul_rn(x[j], x[j]), values[j]);
                    products = __fadd_rn(products, __fmul_rn(weighted, x[j]));
                    norms = __fadd_rn(norms, __fmul_rn(weighted, values[j]));
                }
                products = __shfl_sync(~0u, products, lane, BLOCK_LANES);
                norms = __shfl_sync(~0u, norms, lane, BLOCK_LANES);
            }
        }
    };

    // Of 16 tries the d of least error: each takes the value of largest magnitude for 127, or for one of -134 to -120.
    __device__ iq4_nl_encoder(LaneValues x) {
        const float largest = signed_absmax(x);
        const Sums first(x, __frcp_rn(__fdiv_rn(largest, 127.0f)));
        exact = __fdiv_rn(first.products, first.norms);
        float best = __fmul_rn(exact, first.products);
#pragma unroll 1
        for (int step = -STEPS; step <= STEPS; ++step) {
            const Sums sums(x, __fdiv_rn(step - 127, largest));
            if (sums.norms > 0 && __fmul_rn(sums.products, sums.products) > __fmul_rn(best, sums.norms)) {
                exact = __fdiv_rn(sums.products, sums.norms);
                best = __fmul_rn(exact, sums.products);
            }
        }
        if (fabsf(largest) < LEAST) exact = 0;
        inverse = exact == 0 ? 0.0f : __frcp_rn(exact);
        d = __float2half_rn(exact);
        scale = __half2float(d);
    }
    // The code of the nearest value, the upper of two.
    static __device__ u32 nearest(float x) {
        u32 below = 0;
#pragma unroll
        for (int code = 1; code < 15; ++code) below += x >= value(code);
        return below + !(x - value(below) < value(below + 1) - x);
    }
    static __device__ float value(u32 code) { return float(int(iq4_nl_values(code) & 0xff) - 128); }

    __device__ bool holds() const { return is_finite(d); }
    __device__ u32 code(float x) const { return nearest(__fmul_rn(inverse, x)); }
    __device__ float decode(u32 code) const { return value(code) * scale; }
    __device__ void write(iq4_nl_block& block, LaneCodes codes) const {
        write_nibbles(block, codes);
        if (block_lane() == 0) block.d = d;
    }
};

template <int M16_TILES>
struct iq4_nl : HalfScales<iq4_nl_fields<M16_TILES>> {
    using Codes = iq4_nl_codes;
    static constexpr int ZERO = 0;  // of bytes(), which are values
    using Encoder = iq4_nl_encoder;

    // Row g's codes in the lower half of a word, row g + 8's in the upper.
    static __device__ void to_tile(Codes& codes) {
#pragma unroll
        for (u32& word : codes.qs) {
            u32 tiled = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                tiled |= (word >> 8 * j & 15) << 4 * j | (word >> (8 * j + 4) & 15) << (16 + 4 * j);
            word = tiled;
        }
    }
    static __device__ void from_tile(Codes& codes) {
#pragma unroll
        for (u32& word : codes.qs) {
            u32 nibbles = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                nibbles |= (word >> 4 * j & 15) << 8 * j | (word >> (16 + 4 * j) & 15) << (8 * j + 4);
            word = nibbles;
        }
    }
    static __device__ Fragment fragment(const Codes& codes, int step) {
        Fragment f = codes_f16(codes, step);
#pragma unroll
        for (half2& pair : f.a) pair = levels_from<0>(*reinterpret_cast<const u32*>(&pair), CODE_BIAS);
        return f;
    }
    // (level + CODE_BIAS) * 2^-CODE_EXPONENT as halves.
    static constexpr int CODE_BIAS = 128, CODE_EXPONENT = 24, HIGH_ROW_SHIFT = 0;
    static __device__ Fragment codes_f16(const Codes& codes, int step) {
        const u32 row = iq4_nl_values(codes.qs[step]), row8 = iq4_nl_values(codes.qs[step] >> 16);
        return as_fragment(__byte_perm(row, 0, 0x4240), __byte_perm(row8, 0, 0x4240), __byte_perm(row, 0, 0x4341),
                           __byte_perm(row8, 0, 0x4341));
    }
    static __device__ Bytes bytes(const Codes& codes, int step) {
        return {signed_bytes(iq4_nl_values(codes.qs[step])), signed_bytes(iq4_nl_values(codes.qs[step] >> 16))};
    }
};

}  // namespace qgemm
