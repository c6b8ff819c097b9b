// The product that a grid of prefill_sm90 computes, and how its tiles of y lie: ROW_BLOCKS * 64 rows of W by TOKENS.
//
// Config: Sm90 of config.cuh.
#pragma once

#include "../schedule.cuh"
#include "config.cuh"

namespace qgemm {

template <class Config>
struct Problem {
    static constexpr int K_BLOCKS_PER_STAGE = Config::K_BLOCKS_PER_STAGE;
    i64 n, k;
    int m, row_tiles, k_blocks;  // row_tiles: tiles of y along N; k_blocks: along K
    const StreamK& stream_k;

    __device__ int first_token(int tile) const { return divide(tile, stream_k.row_tiles) * Config::TOKENS; }
    // First token of the box that is loaded. The last box is moved back to end with the matrix, because TMA is slow on
    // boxes that reach beyond it; the tokens in front are stored by the tile before.
    __device__ int first_loaded(int tile) const { return min(first_token(tile), max(m - Config::TOKENS, 0)); }
    __device__ int first_row_block(int tile) const {
        return (tile - divide(tile, stream_k.row_tiles) * row_tiles) * Config::ROW_BLOCKS;
    }

    // k_blocks in stage j of a tile; the first stage of a work tile, and the one after its last.
    __device__ int k_blocks_in(int j) const { return min(K_BLOCKS_PER_STAGE, k_blocks - j * K_BLOCKS_PER_STAGE); }
    __device__ static int first_stage(const WorkTile& s) { return s.first * (Config::WORK_UNIT / K_BLOCKS_PER_STAGE); }
    __device__ int end_stage(const WorkTile& s) const {
        return min(s.end * (Config::WORK_UNIT / K_BLOCKS_PER_STAGE),
                   (k_blocks + K_BLOCKS_PER_STAGE - 1) / K_BLOCKS_PER_STAGE);
    }
};

}  // namespace qgemm
