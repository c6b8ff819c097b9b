// gather_rows: rows of W [n, k] by their index -> y [count, k], decoded. w = scale * level + minimum, exact in float32,
// rounded once to Out.
//
// Four lanes decode a k_block of a row, and with it the row eight below or above, which shares their words. An index
// out of range traps, as in PyTorch.
// Config: Format, KBlock, K_BLOCKS, Out (float, half, bf16), THREADS.
#include "fragment.cuh"
#include "ptx/trap.cuh"
#include "tile_config.cuh"

namespace qgemm {

template <class Config>
__device__ __forceinline__ void gather_rows(const typename Config::Tile* __restrict__ tiles,
                                            const i64* __restrict__ index, typename Config::Out* __restrict__ y, i64 n,
                                            i64 k) {
    using Format = typename Config::TileFormat;
    using Out = typename Config::Out;
    const i64 row = index[blockIdx.x], along = (k + Config::TILE_COLUMNS - 1) / Config::TILE_COLUMNS;
    if (row < 0 || row >= n) trap();
    const int m16 = row % TILE_ROWS / 16, g = row % 8, second_row = row % 16 / 8, t = threadIdx.x % 4;
    const i64 k_block = (i64(blockIdx.y) * Config::THREADS + threadIdx.x) / 4;
    if (k_block * K_BLOCK >= k) return;
    const typename Config::Tile& tile = tiles[row / TILE_ROWS * along + k_block / Config::K_BLOCKS];
    const int k_block_of_tile = k_block % Config::K_BLOCKS;
    const auto codes = tile.k_blocks[k_block_of_tile].codes(m16, 4 * g + t);
    Out* const to = y + blockIdx.x * k + k_block * K_BLOCK + 2 * t;

#pragma unroll
    for (int step = 0; step < Config::K_BLOCK_STEPS; ++step) {
        if (k_block * K_BLOCK + 16 * step >= k) break;
        const int scale_index = Config::scale_index(k_block_of_tile, step);
        const FloatFragment levels = float_levels<Format>(codes, step);
        const float2 scale = tile.fields.scale(m16, g, scale_index), minimum = tile.fields.minimum(m16, g, scale_index);
        const float d = second_row ? scale.y : scale.x, m = second_row ? minimum.y : minimum.x;
#pragma unroll
        for (int half_step = 0; half_step < 2; ++half_step) {
            const float2 level = second_row ? levels.a[2 * half_step + 1] : levels.a[2 * half_step];
            Out* const pair = to + 16 * step + 8 * half_step;
            pair[0] = from_float<Out>(weight<Format>(level.x, d, m));
            pair[1] = from_float<Out>(weight<Format>(level.y, d, m));
        }
    }
}

using TileOf = TileConfig<Config>;

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::TileOf::THREADS)
    gather_rows(const qgemm::TileOf::Tile* __restrict__ tiles, const qgemm::i64* __restrict__ index,
                qgemm::Config::Out* __restrict__ y, qgemm::i64 n, qgemm::i64 k) {
    qgemm::gather_rows<qgemm::TileOf>(tiles, index, y, n, k);
}
