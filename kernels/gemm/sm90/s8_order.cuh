// gemm_sm90_s8: the order in which clusters compute tiles of y and in which requantizer warps convert W.
//
// Clusters take the tiles of y round-robin. ROW_TILES_TOGETHER row tiles come with all their tokens before the next row
// tiles, so that both factors stay in L2. If the last wave would be less than half full, its tiles are cut in two along
// the tokens: half a tile costs little more than half the time.
#pragma once

#include "gemm/schedule.cuh"
#include "eight_bit_layout.cuh"

namespace qgemm {

// A tile of y of a cluster, or one pass of it: passes first_pass .. first_pass + passes - 1 over its tokens.
struct ClusterTile {
    int row_tile, token_tile, first_pass, passes;

    __device__ static int count(const S8Sizes& size) { return 2 * size.row_tiles * size.token_tiles - size.whole; }
    // Tiles from size.whole on are cut in two.
    __device__ static ClusterTile numbered(const S8Sizes& size, int number) {
        const int cut = max(number - size.whole, 0), tile = number - (cut + 1) / 2;
        const int group = tile / (ROW_TILES_TOGETHER * size.token_tiles);
        const int index = tile - group * ROW_TILES_TOGETHER * size.token_tiles;
        const int row_tiles = min(ROW_TILES_TOGETHER, size.row_tiles - group * ROW_TILES_TOGETHER);
        return {group * ROW_TILES_TOGETHER + index % row_tiles, index / row_tiles, cut % 2,
                number < size.whole ? 2 : 1};
    }
};

// Work item of a requantizer warp: 16 rows of a stage of W. cta_tile: number of a CTA's rows along N; m16: number of
// the 16 rows in them.
struct RequantizeItem {
    u32 cta_tile, stage, m16;
};

// The order of work items: the first row tiles stage by stage, then the next row tiles. A stage of a CTA has M16_TILES
// items.
template <int CLUSTER, int M16_TILES>
struct RequantizeOrder {
    int row_tile = 0;                      // the first row tile of the current group
    u32 begin = 0;                         // number of the group's first item
    u32 stage_items, inverse_stage_items;  // items of a stage of the group; 2^32 / stage_items, rounded up

    __device__ explicit RequantizeOrder(const S8Sizes& size) { enter(size); }
    __device__ static u32 count(const S8Sizes& size) { return u32(size.row_tiles) * CLUSTER * M16_TILES * size.stages; }
    // The item of a number, which must not decrease from call to call; the last item for numbers beyond it. The
    // quotient is exact while number * stage_items < 2^32: a slice of W with more than one row tile has 2^16 items at
    // most.
    __device__ RequantizeItem advance(u32 number, const S8Sizes& size) {
        number = min(number, count(size) - 1);
        for (u32 items; number - begin >= (items = stage_items * size.stages); enter(size))
            begin += items, row_tile += size.first_row_tiles;
        const u32 stage = __umulhi(number - begin, inverse_stage_items), index = number - begin - stage * stage_items;
        return {row_tile * CLUSTER + index / M16_TILES, stage, index % M16_TILES};
    }

private:
    __device__ void enter(const S8Sizes& size) {
        stage_items = min(size.first_row_tiles, size.row_tiles - row_tile) * (CLUSTER * M16_TILES);
        inverse_stage_items = ~0u / stage_items + 1;
    }
};

}  // namespace qgemm
