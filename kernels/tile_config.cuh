// A tile of packed weights as it lies in memory: the codes of its k_blocks of K_BLOCK columns, then its fields per
// block. See qgemm/cuda/layout/tile.py; tiles/NAME.cuh is generated from it, formats/NAME.cuh has the functions on it.
#pragma once

#include "host.cuh"

namespace qgemm {

// Config (Format, KBlock, K_BLOCKS) with the tile of its format and the index of the scale of a step of 16 columns.
template <class Base>
struct TileConfig : Base {
    using TileFormat = typename Base::template Format<WARPS>;
    using TileKBlock = typename Base::template KBlock<WARPS>;
    struct Tile {
        TileKBlock k_blocks[Base::K_BLOCKS];
        TileFormat fields;
    };
    static constexpr int TILE_COLUMNS = Base::K_BLOCKS * K_BLOCK, K_BLOCK_STEPS = K_BLOCK / 16;
    static constexpr int GROUP_SIZE = TileFormat::GROUP_SIZE;      // weights that share a scale
    static constexpr int SCALE_STEPS = GROUP_SIZE / 16;            // steps that share a scale
    static constexpr int TILE_SCALES = TILE_COLUMNS / GROUP_SIZE;  // scales of a row in a tile
    static constexpr int K_BLOCKS_PER_SCALE = GROUP_SIZE > K_BLOCK ? GROUP_SIZE / K_BLOCK : 1;
    static constexpr int K_BLOCK_SCALES = GROUP_SIZE < K_BLOCK ? K_BLOCK / GROUP_SIZE : 1;  // 1 for longer groups
    static_assert(GROUP_SIZE % 16 == 0 && TILE_COLUMNS % GROUP_SIZE == 0, "a tile holds whole groups of whole steps");

    // k_block: its number in the tile.
    __device__ static constexpr int scale_index(int k_block, int step) {
        return k_block / K_BLOCKS_PER_SCALE * K_BLOCK_SCALES + step / SCALE_STEPS;
    }
};

}  // namespace qgemm
