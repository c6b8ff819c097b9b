// gemv_simt: y [m, n] = x [m, k] @ W [n, k].T for few tokens, weights decoded in registers, sums in float32.
//
// A CTA owns a row_block of tiles; its groups of four warps take them in turn, a warp owns 16 rows of a tile. Per scale
// the
// levels are multiplied first and the scale is applied to the sum: sum += d * (q . x) + m * sum(x).
// Template: Format, In and Out (float, half, bf16), TOKENS, WARP_SPLIT_K.
#include "row_block.cuh"
#include "tile.cuh"

// Columns 2t, 2t + 1, 2t + 8, 2t + 9 of one 16-wide step of a row of x.
__device__ inline float4 load_step(const In* x) {
    return {to_float(x[0]), to_float(x[1]), to_float(x[8]), to_float(x[9])};
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gemv_simt(const Tile* __restrict__ tiles, const In* __restrict__ x, Out* __restrict__ y, i64 n, i64 k, int m) {
    const WarpCoord coord;
    const i64 along = (k + TILE_COLUMNS - 1) / TILE_COLUMNS;
    constexpr int STEPS = SCALE_STEPS < K_BLOCK_STEPS ? SCALE_STEPS : K_BLOCK_STEPS;  // of a k_block that share a scale
    float acc[2][TOKENS] = {};

    for (i64 i = coord.warp_k * K_BLOCKS; i < along * K_BLOCKS; i = next_k_block(i)) {
        const Tile& tile = tiles[blockIdx.x * along + i / K_BLOCKS];
        const auto codes = tile.k_blocks[i % K_BLOCKS].codes(coord.warp, coord.lane);
#pragma unroll
        for (int part = 0; part < K_BLOCK_STEPS / STEPS; ++part) {
            const i64 column = i * K_BLOCK + part * STEPS * 16;
            if (column >= k) break;  // the padding block of a ragged row
            FloatFragment levels[STEPS];
#pragma unroll
            for (int step = 0; step < STEPS; ++step) levels[step] = float_levels<Format>(codes, STEPS * part + step);
            const int index = scale_index(i % K_BLOCKS, STEPS * part);
            const float2 scale = tile.fields.scale(coord.warp, coord.g, index);
            const float2 minimum = tile.fields.minimum(coord.warp, coord.g, index);
#pragma unroll
            for (int token = 0; token < TOKENS; ++token) {
                if (token >= m) break;
                float dots[2] = {}, total = 0;
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    const float4 v = load_step(x + token * k + column + 16 * step + 2 * coord.t);
                    total += v.x + v.y + v.z + v.w;
#pragma unroll
                    for (int row = 0; row < 2; ++row) {
                        const float2 near = levels[step].a[row];
                        const float2 far = levels[step].a[row + 2];
                        dots[row] += near.x * v.x + near.y * v.y + far.x * v.z + far.y * v.w;
                    }
                }
                acc[0][token] += scale.x * dots[0];
                acc[1][token] += scale.y * dots[1];
                if constexpr (Format::HAS_MINIMUM) {
                    acc[0][token] += minimum.x * total;
                    acc[1][token] += minimum.y * total;
                }
            }
        }
    }
    reduce_and_store(acc, y, i64(blockIdx.x) * TILE_ROWS, n, m);
}
