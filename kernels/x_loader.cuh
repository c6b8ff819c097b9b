// What a lane copies of x into the stages of its warp's pipeline: 16 bytes of some tokens, k_block by k_block.
#pragma once

#include "warp_split_k.cuh"

using Row = In[K_BLOCK + 8];  // padded by eight numbers: a fragment's lanes read from different banks
using Rows = Row[8 * COLUMN_TILES];

template <class Stage>
struct XLoader {
    static constexpr int ACROSS = K_BLOCK * sizeof(In) / 16;  // chunks of a token's share of a k_block
    static constexpr int APART = 32 / ACROSS;                 // tokens between two of a lane

    const In* x;       // of its first token and the next k_block
    i64 token_stride;  // to its next token
    int column, k;     // of the piece, within a row
    int k_block = 0;   // of the tile
    int token, m;
    u32 to;  // within the first stage

    __device__ XLoader(const In* x, i64 k, int m, const WarpCoord& coord, Stage* stages)
        : token_stride(APART * k), k(int(k)), token(coord.lane / ACROSS), m(TOKENS > 1 ? m : 1) {
        const int chunk = coord.lane % ACROSS * (16 / int(sizeof(In)));
        column = coord.warp_k * TILE_COLUMNS + chunk;
        this->x = x + token * k + column;
        to = shared_address(&stages->x[token][chunk]);
    }
    // The next k_block -> stage.
    __device__ void load(int stage) {
        const bool inside = column < k;  // a ragged row ends within its last tile: zeros there
        const u32 into = to + stage * sizeof(Stage);
#pragma unroll
        for (int j = 0; j < (TOKENS + APART - 1) / APART; ++j)
            if (token + j * APART < m) cp_async_16(into + j * APART * sizeof(Row), x + j * token_stride, inside);
        int ahead = K_BLOCK;
        if (++k_block == K_BLOCKS) k_block = 0, ahead += (WARP_SPLIT_K - 1) * TILE_COLUMNS;
        x += ahead, column += ahead;
    }
};
