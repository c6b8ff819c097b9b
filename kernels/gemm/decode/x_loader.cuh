// XLoader: copies of x [m, k] into the stages of a warp by cp.async; a lane copies 16 bytes of a token at a time.
//
// Config: Decode of config.cuh.
#pragma once

#include "pipeline.cuh"

namespace qgemm {

// Rows of x in a stage. A single token is read as all columns of a fragment. Rows of several tokens are padded, so that
// the lanes of a fragment read from different banks.
template <class Config>
using XRow = typename Config::In[Config::TOKENS == 1 ? Config::STAGE_COLUMNS : Config::STAGE_COLUMNS + 8];
template <class Config>
using XRows = XRow<Config>[Config::TOKENS == 1 ? 1 : 8 * Config::N8_TILES];

template <class Config, class Stage>
struct XLoader {
    using In = typename Config::In;
    static constexpr int TOKENS = Config::TOKENS, TILE_COLUMNS = Config::TILE_COLUMNS;
    static constexpr int CHUNKS = Config::STAGE_COLUMNS * sizeof(In) / 16;  // 16 bytes of a token
    static constexpr int TOKENS_AT_ONCE = 32 / CHUNKS;
    static_assert(TOKENS_AT_ONCE > 0, "a lane copies at most one chunk of a token");

    const In* x;       // the lane's chunk of its first token in the next stage
    i64 token_stride;  // from a token of the lane to its next one
    int column, k;     // column: first column of the chunk
    int padded;        // k, rounded up to whole tiles
    int k_block = 0;   // number in the tile
    int token, m;
    u32 to;  // address in the first stage

    __device__ XLoader(const In* x, i64 k, int m, const WarpCoord<Config>& coord, Stage* stages)
        : token_stride(TOKENS_AT_ONCE * k),
          k(int(k)),
          padded(int(coord.tiles_along) * TILE_COLUMNS),
          token(coord.lane / CHUNKS),
          m(TOKENS > 1 ? m : 1) {
        const int chunk = coord.lane % CHUNKS * (16 / int(sizeof(In)));
        column = coord.share * TILE_COLUMNS + chunk;
        this->x = x + token * k + column;
        to = shared_address(&stages->x[token][chunk]);
        enter_matrix();
    }
    // SUMMED: x has K numbers for each of several matrices, end to end. After the tiles of one matrix the next begins.
    __device__ void enter_matrix() {
        if constexpr (Config::SUMMED)
            while (column >= padded) column -= padded, x -= padded - k;
    }
    // Copies the next k_blocks into a stage, zeros beyond k: a ragged row ends within its last tile.
    __device__ void load(int stage) {
        const bool inside = column < k;
        const u32 into = to + stage * sizeof(Stage);
#pragma unroll
        for (int j = 0; j < (TOKENS + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE; ++j)
            if (token + j * TOKENS_AT_ONCE < m)
                cp_async_16(into + j * TOKENS_AT_ONCE * sizeof(XRow<Config>), x + j * token_stride, inside);
        int ahead = Config::STAGE_COLUMNS;
        if (Config::WHOLE_TILES || ++k_block == Config::K_BLOCKS)
            k_block = 0, ahead += (Config::SPLIT_K - 1) * TILE_COLUMNS;
        x += ahead, column += ahead;
        enter_matrix();
    }
};

}  // namespace qgemm
