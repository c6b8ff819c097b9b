// Pipeline of the sm_80 prefill kernels: all threads copy W and x of a k_iter into a stage, by cp.async of 16 bytes.
//
// Config: Sm80 of config.cuh.
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/shared_address.cuh"
#include "config.cuh"

namespace qgemm {

// A k_block of a row_block, with the fields of its tile.
template <class Config>
struct StageWeights {
    typename Config::TileKBlock k_block;
    typename Config::TileFormat fields;
};

// X: a token's share of a k_block of x.
template <class Config, class X>
struct Stage {
    static_assert(sizeof(X) == Config::TOKEN_BYTES, "shared memory of a token differs from the host's");
    StageWeights<Config> weights[Config::WARP_SPLIT_K][Config::ROW_BLOCKS];
    X x[Config::WARP_SPLIT_K][Config::BLOCK_TOKENS];

    __device__ const StageWeights<Config>& weights_of(const WarpCoord<Config>& coord) const {
        return weights[coord.warp_k][coord.first_m16 / WARPS];
    }
};

// Copies W, one k_iter after the other. A team of TEAM_THREADS copies a row_block's k_block in chunks of 16 bytes.
template <class Config>
struct WeightLoader {
    static constexpr int WARP_SPLIT_K = Config::WARP_SPLIT_K, ROW_BLOCKS = Config::ROW_BLOCKS;
    static constexpr int K_BLOCKS = Config::K_BLOCKS, TEAM_THREADS = Config::THREADS / (WARP_SPLIT_K * ROW_BLOCKS);
    static constexpr int K_BLOCK_CHUNKS = sizeof(typename Config::TileKBlock) / 16;
    static constexpr int CHUNKS = sizeof(StageWeights<Config>) / 16;
    using Tile = typename Config::Tile;

    const Tile* row_block;
    int k_block, k_blocks, chunk;  // next k_block, end of the slice, this thread's first chunk
    u32 to;                        // address of this chunk in the first stage

    // p: a CtaTile, or a type with its members and another row_block().
    template <class CtaTile>
    __device__ WeightLoader(StageWeights<Config> (&stage)[WARP_SPLIT_K][ROW_BLOCKS], const Tile* tiles,
                            const CtaTile& p) {
        const int team = threadIdx.x / TEAM_THREADS, warp_k = team / ROW_BLOCKS;
        const Tile* own = p.row_block(tiles, team % ROW_BLOCKS);
        row_block = own ? own : tiles;
        k_blocks = own ? min(p.k_blocks, p.end * WARP_SPLIT_K) : 0;
        k_block = p.first * WARP_SPLIT_K + warp_k;
        chunk = threadIdx.x % TEAM_THREADS;
        to = shared_address(&stage[warp_k][team % ROW_BLOCKS]) + 16 * chunk;
    }
    // Copies the next k_iter to `offset` bytes after the first stage; zeros beyond the slice.
    __device__ void load(u32 offset) {
        const Tile& tile = row_block[k_block / K_BLOCKS];
        const uint4* codes = reinterpret_cast<const uint4*>(&tile.k_blocks[k_block % K_BLOCKS]) + chunk;
        const uint4* fields = reinterpret_cast<const uint4*>(&tile.fields) - K_BLOCK_CHUNKS + chunk;
#pragma unroll
        for (int i = 0; i < CHUNKS; i += TEAM_THREADS)
            if (i + TEAM_THREADS <= CHUNKS || i + chunk < CHUNKS)
                cp_async_16(to + offset + 16 * i, (K_BLOCKS == 1 || i + chunk < K_BLOCK_CHUNKS ? codes : fields) + i,
                            k_block < k_blocks);
        k_block += WARP_SPLIT_K;
    }
};

// Starts to fill all stages but one. Weights never change, so the first of them load before the kernels that write x
// are finished. prepare() runs meanwhile.
template <template <class> class WLoader, class Config, class XLoader, class Prepare>
__device__ inline void fill_stages(WLoader<Config>& w_loader, XLoader& x_loader, u32 stage_bytes, Prepare prepare) {
    constexpr int EARLY = Config::STAGES > 2 ? 2 : 1;
    for (int i = 0; i < EARLY; ++i) w_loader.load(i * stage_bytes);
    prepare();
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    for (int i = 0; i < Config::STAGES - 1; ++i) {
        if (i >= EARLY) w_loader.load(i * stage_bytes);
        x_loader.load(i * stage_bytes);
        cp_async_commit();
    }
}

// Calls multiply(stage, k_iter) for each k_iter of the slice, while later ones are copied.
template <class Config, class Stage, template <class> class WLoader, class XLoader, class Multiply>
__device__ __forceinline__ void for_stages(const Stage* stages, WLoader<Config>& w_loader, XLoader& x_loader,
                                           const CtaTile<Config>& p, Multiply multiply) {
    constexpr int STAGES = Config::STAGES;
    int stage = 0, free = STAGES - 1;
    for (int k_iter = p.first; k_iter < p.end; ++k_iter) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // the stage is full, and all warps have read the previous one
        w_loader.load(free * sizeof(Stage));
        x_loader.load(free * sizeof(Stage));
        cp_async_commit();
        multiply(stages[stage], k_iter);
        free = stage;
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    }
    cp_async_wait<0>();  // the reduction aliases the stages
}

}  // namespace qgemm
