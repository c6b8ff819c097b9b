// A CTA that owns a row_block of TILE_ROWS rows of W. Intra-CTA split-K: WARP_SPLIT_K groups of WARPS warps share its
// tiles along K, and each group accumulates its own sums.
#pragma once

#include "tile_config.cuh"
#include "types.cuh"

namespace qgemm {

// Config: Format, KBlock, K_BLOCKS; Out (float, half, bf16), TOKENS, WARP_SPLIT_K.
template <class Base>
struct RowBlockConfig : TileConfig<Base> {
    static constexpr int THREADS = Base::WARP_SPLIT_K * WARPS * 32;
};

// Coordinates of a thread: lane of the fragment (g, t), 16 rows of a tile (warp), share of K (warp_k).
struct ThreadCoord {
    int warp = threadIdx.x / 32 % WARPS, warp_k = threadIdx.x / 32 / WARPS;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
};

// The k_block after number i of a row_block, for a group that has every WARP_SPLIT_K-th tile.
template <class Config>
__device__ inline i64 next_k_block(i64 i) {
    constexpr int K_BLOCKS = Config::K_BLOCKS;
    return (i + 1) % K_BLOCKS ? i + 1 : i + 1 + (Config::WARP_SPLIT_K - 1) * K_BLOCKS;
}

// unit * acc[row][token] of every lane (rows g and g + 8 of its warp) -> y [m, n], summed in a fixed order: over the
// lanes t = 0..3, which hold parts of the same rows, then over the groups of warps.
template <class Config>
__device__ void reduce_and_store(float (&acc)[2][Config::TOKENS], typename Config::Out* __restrict__ y, i64 first_row,
                                 i64 n, int m, float unit = 1.0f) {
    constexpr int TOKENS = Config::TOKENS, WARP_SPLIT_K = Config::WARP_SPLIT_K;
    __shared__ float partials[WARP_SPLIT_K][TILE_ROWS][TOKENS];
    const ThreadCoord coord;
#pragma unroll
    for (int row = 0; row < 2; ++row)
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            float sum = acc[row][token];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (coord.t == 0) partials[coord.warp_k][16 * coord.warp + 8 * row + coord.g][token] = sum;
        }
    __syncthreads();
    for (int i = threadIdx.x; i < TILE_ROWS * TOKENS; i += Config::THREADS) {
        const int row = i % TILE_ROWS, token = i / TILE_ROWS;
        if (first_row + row >= n || token >= m) continue;
        float sum = 0;
        for (int warp_k = 0; warp_k < WARP_SPLIT_K; ++warp_k) sum += partials[warp_k][row][token];
        y[token * n + first_row + row] = from_float<typename Config::Out>(unit * sum);
    }
}

}  // namespace qgemm
