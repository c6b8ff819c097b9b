// fused: y [m, n] = x [m, k] @ W [n, k].T for few tokens, weights decoded in registers, sums in float32.
//
// A CTA owns a strip of 64 rows; its four groups of four warps take the strip's tiles in turn, a warp owns 16 rows of
// a tile. Per block the levels are multiplied first and the scale is applied to the sum: sum += d * (q . x) + m * sum(x).
// Template: Format, In and Out (float, half, bf16), TOKENS.
#include "fragment.cuh"
#include "reduce.cuh"

// Columns 2t, 2t + 1, 2t + 8, 2t + 9 of one 16-wide step of a row of x.
__device__ inline float4 load_step(const In* x) {
    return {to_float(x[0]), to_float(x[1]), to_float(x[8]), to_float(x[9])};
}

extern "C" __global__ void __launch_bounds__(THREADS)
    fused(const Format* __restrict__ tiles, const In* __restrict__ x, Out* __restrict__ y, i64 n, i64 k, int m) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, split = threadIdx.x / 128;
    const int g = lane / 4, t = lane % 4, along = (k + 63) / 64;
    float sums[2][TOKENS] = {};

    for (int column = split; column < along; column += SPLITS) {
        const Format& tile = tiles[i64(blockIdx.x) * along + column];
        const auto codes = tile.codes(warp, lane);
#pragma unroll
        for (int block = 0; block < 2; ++block) {
            if (64 * i64(column) + 32 * block >= k) break;  // the padding block of a ragged row
            Fragment levels[2] = {Format::fragment(codes, 2 * block), Format::fragment(codes, 2 * block + 1)};
            const float2 scale = tile.scale(warp, g, block), minimum = tile.minimum(warp, g, block);
#pragma unroll
            for (int token = 0; token < TOKENS; ++token) {
                if (token >= m) break;
                float dots[2] = {}, total = 0;
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                    const float4 v = load_step(x + token * k + 64 * i64(column) + 32 * block + 16 * step + 2 * t);
                    total += v.x + v.y + v.z + v.w;
#pragma unroll
                    for (int row = 0; row < 2; ++row) {
                        const float2 near = __half22float2(levels[step].a[row]);
                        const float2 far = __half22float2(levels[step].a[row + 2]);
                        dots[row] += near.x * v.x + near.y * v.y + far.x * v.z + far.y * v.w;
                    }
                }
                sums[0][token] += scale.x * dots[0];
                sums[1][token] += scale.y * dots[1];
                if constexpr (Format::HAS_MINIMUM) {
                    sums[0][token] += minimum.x * total;
                    sums[1][token] += minimum.y * total;
                }
            }
        }
    }
    reduce_and_store(sums, y, 64 * i64(blockIdx.x), n, m);
}
