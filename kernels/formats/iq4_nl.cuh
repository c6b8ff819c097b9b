// iq4_nl:  w = d * value(q),  q in 0..15.       Twin of qgemm/formats/iq4_nl.py.
#pragma once

#include "codes/encoder.cuh"
#include "codes/half_scales.cuh"
#include "codes/iq4_values.cuh"
#include "tiles/iq4_nl.cuh"

namespace qgemm {

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
struct iq4_nl : Iq4Values<HalfScales<iq4_nl_fields<M16_TILES>>> {
    using Encoder = iq4_nl_encoder;
};

}  // namespace qgemm
