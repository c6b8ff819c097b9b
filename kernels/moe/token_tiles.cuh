// Tiles of y of a grouped product: token tiles of experts, from the list of moe_sort, by row tiles of W.
#pragma once

#include "gemm/schedule.cuh"

namespace qgemm {

// The stream-K schedule of a grouped product: tiles after the last whole wave of CTAs are split along K, by the rule of
// sm90_grid.py, which serves dense products, where the host knows the number of tiles.
struct GroupedSchedule {
    static constexpr int WASTE_DIVISOR = 16;  // whole waves may leave 1 / 16 of the tiles' time idle
    static constexpr int MIN_WORK_UNITS = 4;  // per CTA: with fewer, the fix-up costs more than the split saves
    StreamK stream_k;

    // Called by one thread. divisors: a StreamK with its divisors alone. count: of tiles.
    __device__ void init(const StreamK& divisors, int count, int work_units) {
        const int ctas = gridDim.x, waves = (count + ctas - 1) / ctas;
        const bool few =
            u32(count) * work_units < u32(MIN_WORK_UNITS * ctas);  // some CTAs would have no part of a tile
        const bool whole = few || waves * ctas - count <= count / WASTE_DIVISOR;
        const int whole_tiles = whole ? count : max(waves - 2, 0) * ctas;
        const u32 units = u32(count - whole_tiles) * work_units;
        stream_k = divisors;
        stream_k.whole_tiles = whole_tiles, stream_k.cluster_split_k = 0;
        stream_k.units_per_cta = units / ctas, stream_k.remainder = units % ctas;
    }
};

struct TileCoord {
    const TokenTile* tokens;
    int row_tile;
};

// Tile numbers run expert by expert, then along N, then by token tile: CTAs that run together read the same rows of W.
// divisor: divides by row_tiles. last: number of the last token tile.
struct TokenTileMap {
    const TokenTile* token_tiles;
    const Divisor& divisor;
    int row_tiles, last;

    // Numbers beyond the last tile map to the last token tile.
    __device__ TileCoord coord(int tile) const {
        const int number = divide(tile, divisor);
        const TokenTile* tokens = &token_tiles[min(number, last)];
        const int first = tokens->first, count = tokens->count;
        if (count == 1) return {tokens, min(tile - first * row_tiles, row_tiles - 1)};
        const u32 index = min(tile - first * row_tiles, count * row_tiles - 1), row_tile = index / u32(count);
        return {&token_tiles[first + index - row_tile * count], int(row_tile)};
    }
};

}  // namespace qgemm
