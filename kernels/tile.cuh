// A tile as it lies in memory: the codes of its k_blocks of K_BLOCK columns, then its fields per block. See
// qgemm/cuda/layout/tile.py; the k_blocks and the fields are generated from it, the functions on them are the format's
// header.
#pragma once

#include "fragment.cuh"

using Format = FormatOf<WARPS>;

constexpr int TILE_COLUMNS = K_BLOCKS * K_BLOCK;
constexpr int K_BLOCK_STEPS = K_BLOCK / 16;
constexpr int K_BLOCKS_PER_SCALE = Format::GROUP_SIZE > K_BLOCK ? Format::GROUP_SIZE / K_BLOCK : 1;
constexpr int K_BLOCK_SCALES = Format::GROUP_SIZE < K_BLOCK ? K_BLOCK / Format::GROUP_SIZE : 1;  // of a row
constexpr int SCALE_STEPS = Format::GROUP_SIZE / 16;  // steps that share a scale

// Which of a tile's scales a step of a k_block has.
constexpr int scale_index(int k_block, int step) {
    return k_block / K_BLOCKS_PER_SCALE * K_BLOCK_SCALES + step / SCALE_STEPS;
}

struct Tile {
    KBlockOf<WARPS> k_blocks[K_BLOCKS];
    Format fields;
};
