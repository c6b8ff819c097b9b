// Copies of x [m, k] into the stages of a warp of decode: a lane copies 16 bytes of some tokens at a time by cp.async.
//
// Config: Decode of config.cuh.
#pragma once

#include "pipeline.cuh"

namespace qgemm {

// A stage's rows of x. A single token is read as all columns of a fragment; several are padded, so that the lanes of a
// fragment read from different banks.
template <class Config>
using XRow = typename Config::In[Config::TOKENS == 1 ? Config::STAGE_COLUMNS : Config::STAGE_COLUMNS + 8];
template <class Config>
using XRows = XRow<Config>[Config::TOKENS == 1 ? 1 : 8 * Config::COLUMN_TILES];

template <class Config, class Stage>
struct XLoader {
    using In = typename Config::In;
    static constexpr int TOKENS = Config::TOKENS, TILE_COLUMNS = Config::TILE_COLUMNS;
    static constexpr int CHUNKS = Config::STAGE_COLUMNS * sizeof(In) / 16;  // of a token in a stage
    static constexpr int TOKENS_AT_ONCE = 32 / CHUNKS;                      // that a warp copies
    static_assert(TOKENS_AT_ONCE > 0, "a lane copies at most one chunk of a token");

    const In* x;       // this lane's chunk of its first token and the next stage
    i64 token_stride;  // to its next token
    int column, k;     // column: of the chunk
    int padded;        // k, up to the end of a tile
    int k_block = 0;   // of the tile
    int token, m;
    u32 to;  // in the first stage

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
    // SUMMED: x has K numbers for each of several matrices, end to end; enters the next one behind the tiles of the
    // last.
    __device__ void enter_matrix() {
        if constexpr (Config::SUMMED)
            while (column >= padded) column -= padded, x -= padded - k;
    }
    // The next k_blocks -> stage; zeros beyond k, where a ragged row ends within its last tile.
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
