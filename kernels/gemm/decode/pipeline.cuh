// Private pipeline of a warp: the warp fills and reads its own stages, and no other warp waits for it.
//
// A stage holds a k_block or a tile of W for the CTA's rows and, unless X is void, an X of activations.
// Config: Decode of config.cuh.
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/shared_address.cuh"
#include "ptx/elect_sync.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "coord.cuh"

namespace qgemm {

// ---------------------------------------------------------------- stages in shared memory

template <class Weights, class X>
struct PipelineStage : Weights {
    X x;
};
template <class Weights>
struct PipelineStage<Weights, void> : Weights {};

// A stage holds one of several k_blocks of a tile. The tile's fields arrive with its first k_block and stay until its
// last.
template <class Config, class X, bool WHOLE_TILES = Config::WHOLE_TILES>
struct SmemPipeline {
    using Codes = typename Config::Codes;
    using Fields = typename Config::Fields;
    using Tile = typename Config::Tile;
    static constexpr int STAGES = Config::STAGES, ROW_BLOCKS = Config::ROW_BLOCKS, K_BLOCKS = Config::K_BLOCKS;
    static constexpr int TILES =
        1 + (STAGES - 1 + K_BLOCKS - 1) / K_BLOCKS;  // tiles that STAGES k_blocks may belong to
    struct Weights {
        Codes codes_of[ROW_BLOCKS];
    };
    using Stage = PipelineStage<Weights, X>;
    Stage stages[STAGES];
    Fields tile_fields[TILES][ROW_BLOCKS];

    // i: number of the stage among all stages of the warp.
    __device__ const Codes& codes(int stage, int row_block, int = 0) const { return stages[stage].codes_of[row_block]; }
    __device__ const Fields& fields(int i, int, int row_block) const {
        return tile_fields[i / K_BLOCKS % TILES][row_block];
    }
    static __device__ u32 bytes(const KTileIterator<Config>& k_tiles) {
        return k_tiles.coord.row_blocks * (sizeof(Codes) + (k_tiles.k_block == 0 ? sizeof(Fields) : 0));
    }
    template <class Copy>
    __device__ void load(const KTileIterator<Config>& k_tiles, int stage, Copy copy) {
#pragma unroll
        for (int row_block = 0; row_block < ROW_BLOCKS; ++row_block) {
            if (row_block >= k_tiles.coord.row_blocks) break;
            const Tile& tile = k_tiles.of(row_block);
            stages[stage].codes_of[row_block].copy_from(tile.k_blocks[k_tiles.k_block], k_tiles.coord.first_m16, copy);
            if (k_tiles.k_block == 0)
                tile_fields[k_tiles.count % TILES][row_block].copy_from(tile.fields, k_tiles.coord.first_m16, copy);
        }
    }
};

// A stage holds a whole tile. Codes and fields are contiguous: one copy if the CTA has all rows of the row_block.
template <class Config, class X>
struct SmemPipeline<Config, X, true> {
    using Codes = typename Config::Codes;
    using Fields = typename Config::Fields;
    using Tile = typename Config::Tile;
    static constexpr int STAGES = Config::STAGES, ROW_BLOCKS = Config::ROW_BLOCKS, K_BLOCKS = Config::K_BLOCKS;
    struct RowBlock {
        Codes codes[K_BLOCKS];
        Fields fields;
    };
    struct Weights {
        RowBlock row_blocks[ROW_BLOCKS];
    };
    using Stage = PipelineStage<Weights, X>;
    Stage stages[STAGES];

    __device__ const Codes& codes(int stage, int row_block, int k_block = 0) const {
        return stages[stage].row_blocks[row_block].codes[k_block];
    }
    __device__ const Fields& fields(int, int stage, int row_block) const {
        return stages[stage].row_blocks[row_block].fields;
    }
    static __device__ u32 bytes(const KTileIterator<Config>& k_tiles) {
        return k_tiles.coord.row_blocks * sizeof(RowBlock);
    }
    template <class Copy>
    __device__ void load(const KTileIterator<Config>& k_tiles, int stage, Copy copy) {
#pragma unroll
        for (int row_block = 0; row_block < ROW_BLOCKS; ++row_block) {
            if (row_block >= k_tiles.coord.row_blocks) break;
            const Tile& tile = k_tiles.of(row_block);
            RowBlock& to = stages[stage].row_blocks[row_block];
            if constexpr (Config::M16_TILES == WARPS) {
                copy(&to, &tile, sizeof(Tile));
            } else {
#pragma unroll
                for (int k_block = 0; k_block < K_BLOCKS; ++k_block)
                    to.codes[k_block].copy_from(tile.k_blocks[k_block], k_tiles.coord.first_m16, copy);
                to.fields.copy_from(tile.fields, k_tiles.coord.first_m16, copy);
            }
        }
    }
};

// ---------------------------------------------------------------- when a stage is full

// Copies into the stages of a warp and waits for them. For each stage: first_copy, copy, close; later wait. Empty
// stages are closed as well. LANE_COPIES: whether lanes also copy by cp_async_16.
template <int STAGES, bool LANE_COPIES, bool BULK>
struct StageBarriers;

// cp.async.bulk: bytes complete at an mbarrier per stage.
template <int STAGES, bool LANE_COPIES>
struct StageBarriers<STAGES, LANE_COPIES, true> {
    u32 barriers;

    // mbarriers: one for each stage.
    __device__ StageBarriers(unsigned long long* mbarriers) : barriers(shared_address(mbarriers)) {
        if (elect_sync()) {
            for (int stage = 0; stage < STAGES; ++stage) mbarrier_init(barriers + 8 * stage, LANE_COPIES ? 1 + 32 : 1);
            fence_mbarrier_init();
        }
        __syncwarp();
    }
    // bytes: the total of all bulk copies into this stage. copies(copy) calls copy(to, from, bytes).
    template <class Copies>
    __device__ void first_copy(int stage, u32 bytes, Copies copies) const {
        if (elect_sync()) {
            mbarrier_arrive_expect_tx(barriers + 8 * stage, bytes);
            copies(copier(stage));
        }
    }
    template <class Copies>
    __device__ void copy(int stage, Copies copies) const {
        if (elect_sync()) copies(copier(stage));
    }
    __device__ auto copier(int stage) const {
        return [barrier = barriers + 8 * stage](void* to, const void* from, u32 bytes) {
            cp_async_bulk(shared_address(to), from, bytes, barrier);
        };
    }
    __device__ void close(int stage) const {
        if (LANE_COPIES) cp_async_mbarrier_arrive(barriers + 8 * stage);
    }
    __device__ void wait(int stage, int phase) const { mbarrier_wait_parity(barriers + 8 * stage, phase & 1); }
    // Ends all barriers after `count` waits, so that others may be built in their place: every stage was closed once
    // more than it was waited for, and asynchronous arrivals may still be on their way.
    __device__ void end(int count) const {
        __syncwarp();
        for (int stage = 0; stage < STAGES; ++stage) {
            if (elect_sync()) mbarrier_arrive(barriers + 8 * stage);
            wait(stage, (count - stage + STAGES - 1) / STAGES);
        }
        __syncwarp();
        if (elect_sync())
            for (int stage = 0; stage < STAGES; ++stage) mbarrier_inval(barriers + 8 * stage);
        __syncwarp();
    }
};

// cp.async: all lanes copy, a stage is a group.
template <int STAGES, bool LANE_COPIES>
struct StageBarriers<STAGES, LANE_COPIES, false> {
    __device__ StageBarriers(unsigned long long*) {}
    template <class Copies>
    __device__ void first_copy(int stage, u32, Copies copies) const {
        copy(stage, copies);
    }
    template <class Copies>
    __device__ void copy(int, Copies copies) const {
        copies([&](void* to, const void* from, u32 bytes) {
            for (u32 i = threadIdx.x % 32 * 16; i < bytes; i += 32 * 16)
                cp_async_16(shared_address(to) + i, static_cast<const char*>(from) + i, true);
        });
    }
    __device__ void close(int) const { cp_async_commit(); }
    __device__ void wait(int, int) const {
        cp_async_wait<STAGES - 1>();
        __syncwarp();  // copies of other lanes are visible
    }
    __device__ void end(int) const {}
};

// Prefetches the PREFETCH stages that follow those in the pipeline into the L2 cache, while the warp waits for x.
template <class Config, class Pipeline>
__device__ inline void prefetch_w(Pipeline& pipeline, const KTileIterator<Config>& k_tiles) {
    if constexpr (Config::PREFETCH > 0 && Config::BULK) {
        KTileIterator<Config> ahead = k_tiles;
        for (int i = Config::STAGES; i < min(Config::STAGES + Config::PREFETCH, k_tiles.coord.count); ++i) {
            if (elect_sync())
                pipeline.load(ahead, 0,
                              [](void*, const void* from, u32 bytes) { cp_async_bulk_prefetch(from, bytes); });
            ahead.advance();
        }
    }
}

// ---------------------------------------------------------------- main loop

// Main loop of a warp over `count` stages. load_w(stage) and load_x(stage) copy the next k_blocks into a stage;
// multiply(i, stage) accumulates stage number i. W never changes, but earlier kernels may still write x and y:
// prologue() runs while the first weights are in flight, prepare_x() once x may be read. X_FIRST: x may be read from
// the start. Its copies are issued ahead of those of W, since queued after them they would add 3 us. W must come by
// bulk copies, because each stage is closed before they start.
template <int STAGES, bool X_FIRST = false, class Barriers, class LoadW, class Prologue, class PrepareX, class LoadX,
          class Multiply>
__device__ inline void main_loop(int count, const Barriers& barriers, LoadW load_w, Prologue prologue,
                                 PrepareX prepare_x, LoadX load_x, Multiply multiply) {
    const auto load_all_x = [&] {
        for (int stage = 0; stage < STAGES; ++stage) {
            if (stage < count) load_x(stage);
            barriers.close(stage);
        }
    };
    if constexpr (X_FIRST) {
        prepare_x();
        load_all_x();
    }
    for (int stage = 0; stage < min(STAGES, count); ++stage) load_w(stage);
    prologue();
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    if constexpr (!X_FIRST) {
        prepare_x();
        load_all_x();
    }
    int stage = 0, phase = 0;
    for (int i = 0; i < count; ++i) {
        barriers.wait(stage, phase);
        multiply(i, stage);
        __syncwarp();  // every lane has read the stage
        if (i + STAGES < count) {
            load_w(stage);
            load_x(stage);
        }
        barriers.close(stage);
        if (++stage == STAGES) stage = 0, ++phase;
    }
}

}  // namespace qgemm
