// A consumer warpgroup of prefill_sm90: its place, its share of the epilogue tiles, its named barriers.
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
    const Problem<Config>& p;
    int wg_k, row_block;     // in 0..WG_SPLIT_K - 1, in 0..ROW_BLOCKS - 1
    int thread, warp, lane;  // thread and warp of the warpgroup, lane of the warp

    // Whether this warpgroup reduces and stores an epilogue tile of the row_block, and whether a mask holds it as well.
    __device__ bool owns(int epi_tile) const { return WG_SPLIT_K == 1 || Smem<Config>::owner(epi_tile) == wg_k; }
    __device__ bool owns(int epi_tile, u32 epi_tiles) const { return owns(epi_tile) && epi_tiles >> epi_tile & 1; }

    // Waits for the warpgroups of this row_block.
    __device__ void row_block_barrier() const {
        bar_sync(FIRST_ROW_BLOCK_BARRIER + row_block, WG_SPLIT_K * WARPGROUP_THREADS);
    }
    // Waits for the threads of this warpgroup.
    __device__ void warpgroup_barrier() const {
        bar_sync(FIRST_ROW_BLOCK_BARRIER + ROW_BLOCKS + (Config::SINGLE_TILE ? wg_k * ROW_BLOCKS : 0) + row_block,
                 WARPGROUP_THREADS);
    }
};

}  // namespace qgemm
