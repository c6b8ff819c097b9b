// Producer warps of prefill_sm90: one loads W (cp.async.bulk), one loads x (TMA). Both fill the stages in order; the
// copies complete at the stage's mbarrier.
//
// Config: Sm90 of config.cuh.
#pragma once

#include "ptx/cp_async_bulk_tensor.cuh"
#include "ptx/elect_sync.cuh"
#include "ptx/griddepcontrol.cuh"
#include "problem.cuh"
#include "smem.cuh"

namespace qgemm {

// Waits until the mbarriers are initialised: consumers and both producer warps, at different instructions.
template <class Config>
__device__ inline void init_wait() {
    barrier_sync(INIT_BARRIER, Config::CONSUMER_THREADS + 3 * 32);
}
// Called by WARP_INIT after it initialised them. Under racecheck the warp also waits, in init_arrived(), after it has
// given up its registers: after a barrier.arrive without a wait that tool miscounts the warp's other barriers
// (compute-sanitizer 2025.3).
template <class Config>
__device__ inline void init_arrive() {
    if (Config::ARRIVALS == 1) barrier_arrive(INIT_BARRIER, Config::CONSUMER_THREADS + 3 * 32);
}
template <class Config>
__device__ inline void init_arrived() {
    if (Config::ARRIVALS > 1) init_wait<Config>();
}

// The addresses in global memory from which the stages of a work tile are loaded.
template <class Config, bool GROUPED = Config::GROUPED>
struct Source {
    using Tile = typename Config::Tile;
    const Tile* tiles;              // start of the first row_block
    int tiles_along_k, row_blocks;  // row_blocks: inside the matrix
    int token;

    __device__ Source(const Problem<Config>& p, const Tile* all, const WorkTile& s)
        : tiles_along_k(p.k_blocks / Config::K_BLOCKS),
          row_blocks(min(Config::ROW_BLOCKS, int((p.n + TILE_ROWS - 1) / TILE_ROWS) - p.first_row_block(s.tile))),
          token(p.first_loaded(s.tile)) {
        tiles = all + i64(p.first_row_block(s.tile)) * tiles_along_k;
    }
    // first: a tile of the first row_block. Returns the tile at the same place along K of another row_block, or of the
    // last one inside the matrix.
    __device__ const Tile* beside(const Tile* first, int row_block) const {
        return first + min(row_block, row_blocks - 1) * tiles_along_k;
    }
};

template <class Config>
struct Producer {
    static constexpr int K_BLOCKS = Config::K_BLOCKS, K_BLOCKS_PER_STAGE = Config::K_BLOCKS_PER_STAGE;
    using Tile = typename Config::Tile;
    using State = PipelineState<Config::STAGES>;
    Smem<Config>& smem;
    const Problem<Config>& p;
    TileScheduler scheduler;

    // Calls step(source, j, state, tile) for every stage of this CTA when it is empty. j: number of the stage along K;
    // tile: number of the tile of W in this CTA. Calls begin() first, after the first work tile has been fetched.
    template <class Begin, class Step>
    __device__ void for_stages(const Tile* tiles, Begin begin, Step step) {
        State state;
        u32 tile = 0;
        for (WorkTile s; scheduler.fetch(s);) {
            const Source<Config> source(p, tiles, s);
            const int end = p.end_stage(s);
            if (state.phase + state.stage == 0) begin();
            for (int j = p.first_stage(s); j < end; ++j) {
                if (state.phase > 0)
                    mbarrier_wait_parity(shared_address(&smem.empty[state.stage]), state.phase + 1 & 1);
                if (elect_sync()) step(source, j, state, tile);
                state.advance(1);
                if ((j + 1) * K_BLOCKS_PER_STAGE % K_BLOCKS == 0) ++tile;
            }
        }
        if (state.phase + state.stage == 0) begin();  // this CTA has no work tile
    }

    // Loads W without waiting for the kernels before, which may write x: weights never change.
    __device__ void load_w(const Tile* tiles) {
        for_stages(tiles, init_wait<Config>, [&](const Source<Config>& source, int j, const State& state, u32 number) {
            const int k_blocks = p.k_blocks_in(j), k_block = j * K_BLOCKS_PER_STAGE % K_BLOCKS;
            const Tile* from = source.tiles + j * K_BLOCKS_PER_STAGE / K_BLOCKS;
            const u32 full = smem.full_barrier(state);
            mbarrier_arrive_expect_tx(full, source.row_blocks * smem.weights[0].bytes(k_blocks));
#pragma unroll
            for (int row_block = 0; row_block < Config::ROW_BLOCKS; ++row_block) {
                const Tile* tile = source.beside(from, row_block);
                if (row_block < source.row_blocks)
                    smem.weights[row_block].load(state.stage, tile, k_block, k_blocks, full);
                // Fields are also loaded for row_blocks beyond the matrix, whose warps wait for them.
                if (k_block == 0) smem.weights[row_block].load_fields(number, tile);
            }
        });
    }

    __device__ void load_x(const TensorMap* x) {
        if (elect_sync()) prefetch_tensormap(x);
        griddepcontrol_launch_dependents();
        const u32 bytes = min(p.m, Config::BLOCK_TOKENS) * sizeof(smem.x[0][0][0]);  // per k_block
        const auto begin = [] {
            init_wait<Config>();
            griddepcontrol_wait();
        };
        for_stages(nullptr, begin, [&](const Source<Config>& source, int j, const State& state, u32) {
            const int k_blocks = p.k_blocks_in(j);
            const u32 full = smem.full_barrier(state);
            mbarrier_arrive_expect_tx(full, k_blocks * bytes);
#pragma unroll
            for (int k_block = 0; k_block < K_BLOCKS_PER_STAGE; ++k_block)
                if (k_block < k_blocks)
                    tma_load_2d(shared_address(smem.x[state.stage][k_block]), x, source.token,
                                (j * K_BLOCKS_PER_STAGE + k_block) * K_BLOCK, full);
        });
    }
};

template <class Config>
__device__ __forceinline__ void load_x(Producer<Config>& producer, const TensorMap* x) {
    producer.load_x(x);
}

// Work of WARP_INIT and of the consumer warps before x is loaded: none, since x is not quantized here.
template <class Config>
__device__ __forceinline__ void lead_x(const TensorMap*, Smem<Config>&) {}
template <class Config>
__device__ __forceinline__ void prepare_x(const TensorMap*, const Smem<Config>&, int) {}

}  // namespace qgemm
