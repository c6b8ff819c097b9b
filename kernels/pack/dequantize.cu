// dequantize: tiles -> dense W [n, k] * factor, row-major. w = scale * level + minimum, exact in float32, rounded once
// to Out. The factor is a power of two: 1, or the one that scales weights into the range of half.
//
// A CTA owns one k_block of a tile, a warp 16 of its rows. The weights are staged in shared memory so that global
// stores are 16 bytes wide and cover whole rows of the k_block.
// Config: Format, KBlock, K_BLOCKS, Out (float, half, bf16).
#include "fragment.cuh"
#include "tile_config.cuh"

namespace qgemm {

template <class Config>
__device__ __forceinline__ void dequantize(const typename Config::Tile* __restrict__ tiles,
                                           typename Config::Out* __restrict__ w, i64 n, i64 k, float factor) {
    using Format = typename Config::TileFormat;
    using Out = typename Config::Out;
    using Tile = typename Config::Tile;
    constexpr int K_BLOCKS = Config::K_BLOCKS, PER_STORE = 16 / sizeof(Out);
    constexpr int STRIDE = K_BLOCK + PER_STORE;  // 16 bytes of padding in a row avoid bank conflicts
    __shared__ __align__(16) Out staged[TILE_ROWS * STRIDE];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const i64 first_row = i64(blockIdx.y) * TILE_ROWS, first_column = i64(blockIdx.x) * K_BLOCK;
    const Tile& tile = tiles[(i64(blockIdx.y) * gridDim.x + blockIdx.x) / K_BLOCKS];
    const int k_block = blockIdx.x % K_BLOCKS;
    const auto codes = tile.k_blocks[k_block].codes(warp, lane);

#pragma unroll
    for (int step = 0; step < Config::K_BLOCK_STEPS; ++step) {
        const int index = Config::scale_index(k_block, step);
        const FloatFragment levels = float_levels<Format>(codes, step);
        const float2 scale = tile.fields.scale(warp, g, index), minimum = tile.fields.minimum(warp, g, index);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool second_row = i & 1;
            const float d = second_row ? scale.y : scale.x, m = second_row ? minimum.y : minimum.x;
            const float2 level = levels.a[i];
            Out* to = &staged[(16 * warp + 8 * second_row + g) * STRIDE + 16 * step + 8 * (i / 2) + 2 * t];
            to[0] = from_float<Out>(factor * weight<Format>(level.x, d, m));
            to[1] = from_float<Out>(factor * weight<Format>(level.y, d, m));
        }
    }
    __syncthreads();

    constexpr int STORES = K_BLOCK / PER_STORE;
    for (int i = threadIdx.x; i < TILE_ROWS * STORES; i += WARPS * 32) {
        const int row = i / STORES, column = i % STORES * PER_STORE;
        if (first_row + row < n && first_column + column < k)
            *reinterpret_cast<uint4*>(&w[(first_row + row) * k + first_column + column]) =
                *reinterpret_cast<const uint4*>(&staged[row * STRIDE + column]);
    }
}

using TileOf = TileConfig<Config>;

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::WARPS * 32)
    dequantize(const qgemm::TileOf::Tile* __restrict__ tiles, qgemm::Config::Out* __restrict__ w, qgemm::i64 n,
               qgemm::i64 k, float factor) {
    qgemm::dequantize<qgemm::TileOf>(tiles, w, n, k, factor);
}
