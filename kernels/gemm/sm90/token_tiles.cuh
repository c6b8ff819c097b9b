// Tiles of y of a grouped product: token tiles of experts, of which moe_sort wrote the list, by row tiles of W.
#pragma once

#include "gemm/schedule.cuh"

namespace qgemm {

// Tiles that whole waves of CTAs do not take are split along K (stream-K), as sm90_grid.py does where the host knows
// how many there are.
struct GroupedSchedule {
    static constexpr int WASTE_SHARE = 16;  // one in so many tiles is what whole waves may leave idle
    static constexpr int LEAST_UNITS = 4;   // of a CTA: a fix-up costs more than less work saves
    StreamK stream_k;

    // sizes: the divisors. count: of tiles. By one thread.
    __device__ void init(const StreamK& sizes, int count, int work_units) {
        const int ctas = gridDim.x, waves = (count + ctas - 1) / ctas;
        // CTAs that share a tile must all have a part of it.
        const bool few = u32(count) * work_units < u32(LEAST_UNITS * ctas);
        const bool whole = few || waves * ctas - count <= count / WASTE_SHARE;
        const int whole_tiles = whole ? count : max(waves - 2, 0) * ctas;
        const u32 units = u32(count - whole_tiles) * work_units;
        stream_k = sizes;
        stream_k.whole_tiles = whole_tiles, stream_k.cluster_split_k = 0;
        stream_k.units_per_cta = units / ctas, stream_k.remainder = units % ctas;
    }
};

struct TileCoord {
    const TokenTile* tokens;
    int row_tile;
};

// Numbers of tiles run expert by expert, then along N, then by token tile: CTAs that run together read the same rows of
// W. divisor: by row_tiles. last: number of the last token tile.
struct TokenTileMap {
    const TokenTile* token_tiles;
    const Divisor& divisor;
    int row_tiles, last;

    // A tile behind the last is one of the last token tile.
    __device__ TileCoord at(int tile) const {
        const int number = divide(tile, divisor);
        const TokenTile* tokens = &token_tiles[min(number, last)];
        const int first = tokens->first, count = tokens->count;
        if (count == 1) return {tokens, min(tile - first * row_tiles, row_tiles - 1)};
        const u32 of_expert = min(tile - first * row_tiles, count * row_tiles - 1), row_tile = of_expert / u32(count);
        return {&token_tiles[first + of_expert - row_tile * count], int(row_tile)};
    }
};

}  // namespace qgemm
