// Problem: the product that a grid of prefill_sm90 computes, and the coordinates of its tiles of y: ROW_BLOCKS * 64
// rows by BLOCK_TOKENS tokens.
//
// Config: Sm90 of config.cuh. GROUPED: products by experts, see grouped.cuh.
#pragma once

#include "gemm/schedule.cuh"
#include "config.cuh"

namespace qgemm {

// Stages of a tile along K.
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
    // Work units of a tile of y along K.
    __device__ int work_units() const { return (k_blocks + Config::WORK_UNIT - 1) / Config::WORK_UNIT; }
};

template <class Config, bool GROUPED = Config::GROUPED>
struct Problem : KStages<Config> {
    i64 n, k;
    int m, row_tiles;  // row_tiles: tiles of y along N
    const StreamK& stream_k;

    __device__ int first_token(int tile) const { return divide(tile, stream_k.row_tiles) * Config::BLOCK_TOKENS; }
    // First token of the box that is loaded. The last box is moved back to end with the matrix, because TMA is slow on
    // boxes that reach beyond it; its first tokens are stored by the tile before. Codes of int8 are in groups of 16
    // tokens.
    __device__ int first_loaded(int tile) const {
        const int rows = Config::EIGHT_BITS ? (m + 15) / 16 * 16 : m;
        return min(first_token(tile), max(rows - Config::BLOCK_TOKENS, 0));
    }
    __device__ int first_row_block(int tile) const {
        return (tile - divide(tile, stream_k.row_tiles) * row_tiles) * Config::ROW_BLOCKS;
    }

    // The row_block of a warpgroup; may be beyond the matrix.
    __device__ i64 row_block(int tile, int row_block) const { return first_row_block(tile) + row_block; }
    // absmax of the row_block's rows; beyond the matrix those of the last row_block.
    __device__ const float* row_absmax(const float* w_absmax, int tile, int number) const {
        return w_absmax + min(row_block(tile, number), (n - 1) / TILE_ROWS) * TILE_ROWS;
    }
    // One past the last token of a tile.
    __device__ int end_token(int) const { return m; }
};

// The type of Warpgroup::p.
template <class Config>
struct ProblemOf {
    using Type = Problem<Config>;
};

}  // namespace qgemm
