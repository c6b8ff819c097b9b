// Sm80<Config>: constants that follow from a configuration of the mma.sync prefill kernels. The headers of sm80/ are
// templates over it.
//
// A CTA owns ROW_BLOCKS row_blocks of 64 rows of W, BLOCK_TOKENS tokens and one of split_k slices of K. A k_iter is
// K_ITER k_blocks, one for each warp along K. A warp owns M16_TILES groups of 16 rows and one k_block of every k_iter.
// Config: Format, KBlock and K_BLOCKS, see tile_config.cuh, and
//   In, Out                   types of x and y: float, half, bf16
//   BLOCK_TOKENS, ROW_BLOCKS, M16_TILES (1, 2, 4), WARP_SPLIT_K, STAGES (at least 3), MAX_SPLIT_K
//   EPI_TOKENS                tokens that are reduced and stored together
//   TOKEN_BYTES               a token's share of a k_block of x in shared memory
//   REDUCE_BYTES, SMEM_BYTES  shared memory of the reduction, and dynamic shared memory of the CTA
#pragma once

#include "ptx/mma.cuh"
#include "tile_config.cuh"

namespace qgemm {

template <class Base>
struct Sm80 : TileConfig<Base> {
    using Base::BLOCK_TOKENS, Base::ROW_BLOCKS, Base::M16_TILES, Base::WARP_SPLIT_K;

    static constexpr int ROWS = ROW_BLOCKS * TILE_ROWS, K_ITER = WARP_SPLIT_K;
    static constexpr int ROW_WARPS = ROW_BLOCKS * WARPS / M16_TILES;  // warps that share a k_block
    static constexpr int THREADS = 32 * ROW_WARPS * WARP_SPLIT_K;
    static constexpr int COLUMN_TILES = BLOCK_TOKENS / 8;
    using WarpAcc = Acc[M16_TILES][COLUMN_TILES];
};

// The CTA's share of y [m, n] = x [m, k] @ W [n, k].T.
template <class Config>
struct CtaTile {
    i64 n, k, first_row;
    int m, first_token;
    int k_blocks, first, end;  // k_blocks: along K; first, end: k_iters of this slice
    int tile, cta_k;           // number of the tile of y, of the slice of K

    __device__ CtaTile(i64 n, i64 k, int m, int split_k)
        : n(n), k(k), m(m), tile(blockIdx.x / split_k), cta_k(blockIdx.x % split_k) {
        const int token_tiles = (m + Config::BLOCK_TOKENS - 1) / Config::BLOCK_TOKENS;
        first_row = i64(tile / token_tiles) * Config::ROWS, first_token = tile % token_tiles * Config::BLOCK_TOKENS;
        k_blocks = int((k + Config::TILE_COLUMNS - 1) / Config::TILE_COLUMNS) * Config::K_BLOCKS;
        const i64 k_iters = (k_blocks + Config::K_ITER - 1) / Config::K_ITER;
        first = int(k_iters * cta_k / split_k), end = int(k_iters * (cta_k + 1) / split_k);
    }
    // A tile that begins at first_row and first_token, ends at token m and has all of K.
    __device__ CtaTile(i64 n, i64 k, i64 first_row, int first_token, int m) : CtaTile(n, k, m, 1) {
        this->first_row = first_row, this->first_token = first_token;
    }
    // The first tile of W of a row_block of the CTA; null beyond the matrix.
    __device__ const typename Config::Tile* row_block(const typename Config::Tile* tiles, int number) const {
        const i64 row = first_row + number * TILE_ROWS;
        return row < n ? tiles + row / TILE_ROWS * (k_blocks / Config::K_BLOCKS) : nullptr;
    }
};

// Coordinates of a warp in the CTA: its k_block of a k_iter and its first group of 16 rows.
template <class Config>
struct WarpCoord {
    int lane = threadIdx.x % 32, warp_k, first_m16;

    __device__ WarpCoord() {
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        warp_k = warp / Config::ROW_WARPS, first_m16 = warp % Config::ROW_WARPS * Config::M16_TILES;
    }
};

}  // namespace qgemm
