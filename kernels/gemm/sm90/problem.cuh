// The product that a grid of prefill_sm90 computes, and how its tiles of y lie: ROW_BLOCKS * 64 rows of W by TOKENS.
//
// Config: Sm90 of config.cuh. GROUPED: the product is one of experts, see grouped.cuh.
#pragma once

#include "gemm/schedule.cuh"
#include "config.cuh"

namespace qgemm {

// k_blocks in stage j of a tile; the first stage of a work tile, and the one after its last.
template <class Config>
struct KStages {
    static constexpr int K_BLOCKS_PER_STAGE = Config::K_BLOCKS_PER_STAGE;
    int k_blocks;  // along K

    __device__ int k_blocks_in(int j) const { return min(K_BLOCKS_PER_STAGE, k_blocks - j * K_BLOCKS_PER_STAGE); }
    __device__ static int first_stage(const WorkTile& s) { return s.first * (Config::WORK_UNIT / K_BLOCKS_PER_STAGE); }
    __device__ int end_stage(const WorkTile& s) const {
        return min(s.end * (Config::WORK_UNIT / K_BLOCKS_PER_STAGE),
                   (k_blocks + K_BLOCKS_PER_STAGE - 1) / K_BLOCKS_PER_STAGE);
    }
};

// k_blocks along K, row_blocks along N, and tiles of y along N.
template <class Config>
struct Extent {
    int k_blocks, row_blocks, row_tiles;

    __device__ Extent(i64 n, i64 k)
        : k_blocks(int((k + Config::TILE_COLUMNS - 1) / Config::TILE_COLUMNS) * Config::K_BLOCKS),
          row_blocks(int((n + TILE_ROWS - 1) / TILE_ROWS)),
          row_tiles((row_blocks + Config::Y_ROW_BLOCKS - 1) / Config::Y_ROW_BLOCKS) {}
};

template <class Config, bool GROUPED = Config::GROUPED>
struct Problem : KStages<Config> {
    i64 n, k;
    int m, row_tiles;  // row_tiles: tiles of y along N
    const StreamK& stream_k;

    __device__ int first_token(int tile) const { return divide(tile, stream_k.row_tiles) * Config::TOKENS; }
    // First token of the box that is loaded. The last box is moved back to end with the matrix, because TMA is slow on
    // boxes that reach beyond it; the tokens in front are stored by the tile before. Codes of eight bits come in
    // sixteens.
    __device__ int first_loaded(int tile) const {
        const int rows = Config::EIGHT_BITS ? (m + 15) / 16 * 16 : m;
        return min(first_token(tile), max(rows - Config::TOKENS, 0));
    }
    __device__ int first_row_block(int tile) const {
        return (tile - divide(tile, stream_k.row_tiles) * row_tiles) * Config::ROW_BLOCKS;
    }

    // The row_block of a warpgroup; the one of a tile beyond the matrix is its last.
    __device__ i64 row_block(int tile, int row_block) const { return first_row_block(tile) + row_block; }
    __device__ const float* row_absmax(const float* of_w, int tile, int number) const {
        return of_w + min(row_block(tile, number), (n - 1) / TILE_ROWS) * TILE_ROWS;
    }
    // The token behind the last of a tile.
    __device__ int end_token(int) const { return m; }
};

}  // namespace qgemm
