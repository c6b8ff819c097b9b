// The copies of level 4, which level 5 keeps: stages of shared memory that belong to one warp.
#pragma once

#include "ladder_masked.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared_address.cuh"

namespace qgemm {

constexpr int STAGES = 4;

struct Stage {
    u32 codes[32][4];
    half d[8][2][2];
};

// A row group of a tile, 512 + 64 bytes: every lane copies its codes, the first four lanes copy the scales.
__device__ inline void copy_row_group(Stage& stage, const LadderTile* tile, int group, bool inside) {
    const int lane = threadIdx.x % 32;
    if (inside) {
        cp_async_16(shared_address(stage.codes[lane]), tile->codes[group][lane], true);
        if (lane < 4) cp_async_16(shared_address(stage.d[2 * lane]), tile->d[group][2 * lane], true);
    }
    cp_async_commit();  // an empty group, too, so that the count of groups is the count of tiles
}

}  // namespace qgemm
