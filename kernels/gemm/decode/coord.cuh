// WarpCoord: the product, the rows and the tiles along K of a warp of decode.
//
// Config: Decode of config.cuh.
#pragma once

#include "config.cuh"

namespace qgemm {

template <class Config>
struct WarpCoord {
    using Tile = typename Config::Tile;
    static constexpr int SPLIT_K = Config::SPLIT_K, CLUSTER_SPLIT_K = Config::CLUSTER_SPLIT_K;
    static constexpr bool X_FIRST = false;  // copies of x are not issued ahead of W (main_loop)

    const Products& products;
    int index;           // number of the product
    int warp_k, lane;    // number of the warp in the CTA, and of the lane in the warp
    int share;           // number of the warp among the SPLIT_K warps that share K
    i64 first_row;       // first row of the CTA
    int first_m16;       // first group of 16 rows in the row_block
    int row_blocks;      // row_blocks of the CTA inside the matrix
    const Tile* tiles;   // first tile of this warp
    i64 tiles_along;     // tiles of a row_block along K
    int count;           // stages of this warp
    i64 next_row_block;  // bytes from a tile to the tile below it, in the next row_block

    __device__ WarpCoord(const Products& products) : products(products), index(0) {
        if (!Config::GATED)
            while (blockIdx.x >= products.of[index].end) ++index;
        warp_k = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
        tiles_along = (products.k + Config::TILE_COLUMNS - 1) / Config::TILE_COLUMNS;
        share = blockIdx.x % CLUSTER_SPLIT_K * Config::WARP_SPLIT_K + warp_k;
        first_row = (blockIdx.x - (index ? products.of[index - 1].end : 0)) / CLUSTER_SPLIT_K * Config::ROWS;
        first_m16 = first_row % TILE_ROWS / 16;
        row_blocks =
            Config::GATED
                ? 2
                : int(min(i64(Config::ROW_BLOCKS), (products.of[index].n - first_row + TILE_ROWS - 1) / TILE_ROWS));
        tiles = static_cast<const Tile*>(products.arrays[index].tiles) + first_row / TILE_ROWS * tiles_along + share;
        next_row_block = tiles_along * i64(sizeof(Tile));
        if (Config::GATED)
            next_row_block =
                static_cast<const char*>(products.arrays[1].tiles) - static_cast<const char*>(products.arrays[0].tiles);
        count = int(tiles_along - share + SPLIT_K - 1) / SPLIT_K * Config::STAGES_OF_TILE;
    }
};

// The k_blocks of a warp in order, a stage at a time. SUMMED: through several matrices (expert_coord.cuh).
template <class Config, bool SUMMED = Config::SUMMED>
struct KTileIterator {
    const WarpCoord<Config>& coord;
    const typename Config::Tile* tile = coord.tiles;  // current tile of the first row_block
    int k_block = 0;                                  // first k_block of the stage, in the tile
    int count = 0;                                    // number of the tile in the warp

    __device__ const typename Config::Tile& of(int row_block) const {
        const char* first = reinterpret_cast<const char*>(tile);
        return *reinterpret_cast<const typename Config::Tile*>(first + row_block * coord.next_row_block);
    }
    __device__ void advance() {
        if (Config::WHOLE_TILES || ++k_block == Config::K_BLOCKS) tile += Config::SPLIT_K, ++count, k_block = 0;
    }
};

}  // namespace qgemm
