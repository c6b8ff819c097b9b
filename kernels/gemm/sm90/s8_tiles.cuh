// gemm_sm90_s8: in which order clusters go through the tiles of y, and makers through W.
//
// A cluster takes the tiles of y by its number, then so many clusters further on, ROW_TILES_TOGETHER row tiles with all
// their tokens before the next, so that both factors stay in L2. Tiles that would make a last wave of less than half of
// the clusters are cut in two along tokens: each half takes little more than half of the time.
#pragma once

#include "eight_bit_layout.cuh"

namespace qgemm {

// half: the first of `halves` of the tokens of a tile.
struct S8Tile {
    int row_tile, token_tile, half, halves;

    __device__ static int count(const S8Sizes& size) { return 2 * size.row_tiles * size.token_tiles - size.whole; }
    __device__ static S8Tile at(const S8Sizes& size, int number) {
        const int cut = max(number - size.whole, 0), tile = number - (cut + 1) / 2;
        const int group = tile / (ROW_TILES_TOGETHER * size.token_tiles);
        const int of = tile - group * ROW_TILES_TOGETHER * size.token_tiles;
        const int across = min(ROW_TILES_TOGETHER, size.row_tiles - group * ROW_TILES_TOGETHER);
        return {group * ROW_TILES_TOGETHER + of % across, of / across, cut % 2, number < size.whole ? 2 : 1};
    }
};

// 16 rows of a stage of W: of the rows of a CTA, number `rows` along N, the `place`th 16.
struct S8Unit {
    u32 rows, stage, place;
};

// Goes forward through the units, OF_CTA of a stage of each CTA: of the first row tiles stage by stage, then of the
// next.
template <int CLUSTER, int OF_CTA>
struct S8UnitCursor {
    int row_tile = 0;             // the first of these row tiles
    u32 begin = 0;                // number of their first unit
    u32 of_stage, over_of_stage;  // units of their stages; 2^32 / of_stage, rounded up

    __device__ explicit S8UnitCursor(const S8Sizes& size) { enter(size); }
    __device__ static u32 count(const S8Sizes& size) { return u32(size.row_tiles) * CLUSTER * OF_CTA * size.stages; }
    // number: not before those that were asked for before; of numbers that are too large the last. The quotient is
    // right where number * of_stage < 2^32: a slice of more than one row tile has 2^16 units at most.
    __device__ S8Unit advance(u32 number, const S8Sizes& size) {
        number = min(number, count(size) - 1);
        for (u32 units; number - begin >= (units = of_stage * size.stages); enter(size))
            begin += units, row_tile += size.first_row_tiles;
        const u32 stage = __umulhi(number - begin, over_of_stage), place = number - begin - stage * of_stage;
        return {row_tile * CLUSTER + place / OF_CTA, stage, place % OF_CTA};
    }

private:
    __device__ void enter(const S8Sizes& size) {
        of_stage = min(size.first_row_tiles, size.row_tiles - row_tile) * (CLUSTER * OF_CTA);
        over_of_stage = ~0u / of_stage + 1;
    }
};

}  // namespace qgemm
