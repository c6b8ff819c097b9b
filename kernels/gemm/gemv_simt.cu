// gemv_simt: y [m, n] = x [m, k] @ W [n, k].T for few tokens, weights decoded in registers, sums in float32.
//
// A CTA owns a row_block of tiles; its groups of four warps take them in turn, a warp owns 16 rows of a tile. Levels of
// a group are multiplied first and the scale is applied to their sum: acc += d * (q . x) + m * sum(x).
// Config: that of row_block.cuh, and In (float, half, bf16).
#include "fragment.cuh"
#include "gemm/row_block.cuh"

namespace qgemm {

// Columns 2t, 2t + 1, 2t + 8, 2t + 9 of one 16-wide step of a row of x.
template <class In>
__device__ inline float4 load_step(const In* x) {
    return {to_float(x[0]), to_float(x[1]), to_float(x[8]), to_float(x[9])};
}

template <class Config>
__device__ __forceinline__ void gemv_simt(const typename Config::Tile* __restrict__ tiles,
                                          const typename Config::In* __restrict__ x,
                                          typename Config::Out* __restrict__ y, i64 n, i64 k, int m) {
    using Format = typename Config::TileFormat;
    using Tile = typename Config::Tile;
    constexpr int TOKENS = Config::TOKENS, K_BLOCKS = Config::K_BLOCKS, K_BLOCK_STEPS = Config::K_BLOCK_STEPS;
    constexpr int SCALE_STEPS = Config::SCALE_STEPS;
    const ThreadCoord coord;
    const i64 along = (k + Config::TILE_COLUMNS - 1) / Config::TILE_COLUMNS;
    constexpr int STEPS = SCALE_STEPS < K_BLOCK_STEPS ? SCALE_STEPS : K_BLOCK_STEPS;  // of a k_block that share a scale
    float acc[2][TOKENS] = {};

    for (i64 i = coord.warp_k * K_BLOCKS; i < along * K_BLOCKS; i = next_k_block<Config>(i)) {
        const Tile& tile = tiles[blockIdx.x * along + i / K_BLOCKS];
        const auto codes = tile.k_blocks[i % K_BLOCKS].codes(coord.warp, coord.lane);
#pragma unroll
        for (int part = 0; part < K_BLOCK_STEPS / STEPS; ++part) {
            const i64 column = i * K_BLOCK + part * STEPS * 16;
            if (column >= k) break;  // the padding block of a ragged row
            FloatFragment levels[STEPS];
#pragma unroll
            for (int step = 0; step < STEPS; ++step) levels[step] = float_levels<Format>(codes, STEPS * part + step);
            const int index = Config::scale_index(i % K_BLOCKS, STEPS * part);
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
    reduce_and_store<Config>(acc, y, i64(blockIdx.x) * TILE_ROWS, n, m);
}

using GemvConfig = RowBlockConfig<Config>;

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::GemvConfig::THREADS)
    gemv_simt(const qgemm::GemvConfig::Tile* __restrict__ tiles, const qgemm::Config::In* __restrict__ x,
              qgemm::Config::Out* __restrict__ y, qgemm::i64 n, qgemm::i64 k, int m) {
    qgemm::gemv_simt<qgemm::GemvConfig>(tiles, x, y, n, k, m);
}
