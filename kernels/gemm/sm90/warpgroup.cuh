// Warpgroup: the coordinates of a consumer warpgroup, its share of the epilogue tiles, its named barriers.
//
// Config: Sm90 of config.cuh.
#pragma once

#include "problem.cuh"
#include "smem.cuh"

namespace qgemm {

template <class Config>
struct Warpgroup {
    static constexpr int ROW_BLOCKS = Config::ROW_BLOCKS, WG_SPLIT_K = Config::WG_SPLIT_K;
    using Peers = TilePeers<Config::EPI_TILES>;
    Smem<Config>& smem;
    const typename ProblemOf<Config>::Type& p;
    int wg_k, row_block;     // in 0..WG_SPLIT_K - 1, in 0..ROW_BLOCKS - 1
    int thread, warp, lane;  // thread and warp within the warpgroup, lane within the warp

    // Whether this warpgroup reduces and stores an epilogue tile of its row_block; epi_tiles: and a mask contains it.
    __device__ bool owns(int epi_tile) const { return WG_SPLIT_K == 1 || Smem<Config>::owner(epi_tile) == wg_k; }
    __device__ bool owns(int epi_tile, u32 epi_tiles) const { return owns(epi_tile) && epi_tiles >> epi_tile & 1; }

    // Barrier of the warpgroups of this row_block.
    __device__ void row_block_barrier() const {
        bar_sync(FIRST_ROW_BLOCK_BARRIER + row_block, WG_SPLIT_K * WARPGROUP_THREADS);
    }
    // Barrier of the threads of this warpgroup.
    __device__ void warpgroup_barrier() const {
        bar_sync(FIRST_ROW_BLOCK_BARRIER + ROW_BLOCKS + (Config::SINGLE_TILE ? wg_k * ROW_BLOCKS : 0) + row_block,
                 WARPGROUP_THREADS);
    }
};

}  // namespace qgemm
