// Shared memory of prefill_sm90: the pipelines of W and x with their mbarriers, and the buffers of reduction and
// epilogue.
//
// Config: Sm90 of config.cuh.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_address.cuh"
#include "config.cuh"
#include "pipeline_state.cuh"

namespace qgemm {

// The pipeline of W of a row_block. A stage has whole tiles. With TILES_PER_STAGE 0 it has k_blocks of a tile, and the
// fields have stages of their own, because they are read until the tile's last k_block. tile: number of a tile among
// those of the CTA.
template <class Config, int TILES_PER_STAGE>
struct SmemPipeline {
    static constexpr int K_BLOCKS = Config::K_BLOCKS;
    using Tile = typename Config::Tile;
    Tile tiles[Config::STAGES][TILES_PER_STAGE];

    __device__ const auto& codes(int stage, int k_block) const {
        return tiles[stage][k_block / K_BLOCKS].k_blocks[k_block % K_BLOCKS];
    }
    __device__ const auto& fields(int stage, int k_block, u32) const { return tiles[stage][k_block / K_BLOCKS].fields; }
    __device__ static u32 bytes(int k_blocks) { return k_blocks / K_BLOCKS * sizeof(Tile); }
    __device__ void load(int stage, const Tile* from, int, int k_blocks, u32 barrier) {
        cp_async_bulk(shared_address(tiles[stage]), from, bytes(k_blocks), barrier);
    }
    __device__ void load_fields(u32, const Tile*) {}
    __device__ void init() {}
    __device__ void wait_fields(u32) const {}
};

template <class Config>
struct SmemPipeline<Config, 0> {
    static constexpr int STAGES = Config::STAGES, FIELD_STAGES = Config::FIELD_STAGES;
    static constexpr int K_BLOCKS = Config::K_BLOCKS, K_BLOCKS_PER_STAGE = Config::K_BLOCKS_PER_STAGE;
    static_assert(FIELD_STAGES * K_BLOCKS >= (STAGES - 1) * K_BLOCKS_PER_STAGE + K_BLOCKS,
                  "fields stay until the tile is read");
    static_assert(FIELD_STAGES * K_BLOCKS / K_BLOCKS_PER_STAGE % Config::WG_SPLIT_K == 0,
                  "the same warpgroups read all tiles of a field stage");
    using Fields = typename Config::TileFormat;
    using Tile = typename Config::Tile;
    using KBlocks = typename Config::TileKBlock[K_BLOCKS_PER_STAGE];
    KBlocks k_blocks[STAGES];
    Fields field_stages[FIELD_STAGES];
    unsigned long long full[FIELD_STAGES];

    __device__ const auto& codes(int stage, int k_block) const { return k_blocks[stage][k_block]; }
    __device__ const auto& fields(int, int, u32 tile) const { return field_stages[tile % FIELD_STAGES]; }
    __device__ static u32 bytes(int) { return sizeof(KBlocks); }
    __device__ void load(int stage, const Tile* from, int k_block, int, u32 barrier) {
        cp_async_bulk(shared_address(k_blocks[stage]), &from->k_blocks[k_block], bytes(K_BLOCKS_PER_STAGE), barrier);
    }
    __device__ u32 barrier(u32 tile) const { return shared_address(&full[tile % FIELD_STAGES]); }
    __device__ void load_fields(u32 tile, const Tile* from) {
        mbarrier_arrive_expect_tx(barrier(tile), sizeof(Fields));
        cp_async_bulk(shared_address(&field_stages[tile % FIELD_STAGES]), &from->fields, sizeof(Fields), barrier(tile));
    }
    __device__ __forceinline__ void init() {
#pragma unroll
        for (int stage = 0; stage < FIELD_STAGES; ++stage) mbarrier_init(barrier(stage), 1);
    }
    __device__ void wait_fields(u32 tile) const { mbarrier_wait_parity(barrier(tile), tile / FIELD_STAGES & 1); }
};

template <class Config>
using WeightPipeline = SmemPipeline<Config, Config::WHOLE_TILES ? Config::K_BLOCKS_PER_STAGE / Config::K_BLOCKS : 0>;

// Partial sums of an epilogue tile from the warpgroups along K that do not own it, in the order of their registers.
template <class Config>
using Partial = float4[Config::WG_SPLIT_K > 1 ? Config::WG_SPLIT_K - 1 : 1][Config::EPI_QUADS][WARPGROUP_THREADS];
// An epilogue tile; the rows of a token are adjacent.
template <class Config>
using EpilogueSmem = float[Config::EPI_TOKENS][TILE_ROWS + 4];
// Partial sums from the peer CTA of a cluster: half of the epilogue tiles of a row_block.
template <class Config>
using PeerInbox = float4[(Config::EPI_TILES + 1) / 2 * Config::EPI_QUADS][WARPGROUP_THREADS];

template <class Config>
using XStages = typename Config::In[Config::STAGES][Config::K_BLOCKS_PER_STAGE / Config::X_K_BLOCKS]
                                   [Config::BLOCK_TOKENS][Config::X_COLUMNS];  // swizzled

// Stages of x, and buffers of reduction and epilogue. With several work tiles per CTA the buffers have memory of their
// own, and the first warpgroup along K owns all epilogue tiles, one after the other.
template <class Config, bool SINGLE_TILE = Config::SINGLE_TILE>
struct XSmem {
    union ReduceSmem {
        Partial<Config> partial;
        EpilogueSmem<Config> epi_smem;
    };
    union {
        XStages<Config> x;
        PeerInbox<Config> peer_inbox[Config::ROW_BLOCKS];  // after the last stage has been read
    };
    ReduceSmem reduce[Config::ROW_BLOCKS];

    __device__ auto& partial(int row_block, int) { return reduce[row_block].partial; }
    __device__ auto& epi_smem(int row_block, int) { return reduce[row_block].epi_smem; }
    __device__ static int owner(int) { return 0; }
    __device__ static void alias_x_stages() {}
};

// With a single work tile the buffers alias the stages, and every warpgroup along K owns some of the epilogue tiles.
template <class Config>
struct XSmem<Config, true> {
    struct ReduceSmem {
        Partial<Config> partials[Config::EPI_TILES];
        EpilogueSmem<Config> epi_smem[Config::WG_SPLIT_K];
    };
    union {
        XStages<Config> x;
        struct {
            ReduceSmem reduce[Config::ROW_BLOCKS];
            PeerInbox<Config> peer_inbox[Config::ROW_BLOCKS];
        };
    };

    __device__ auto& partial(int row_block, int epi_tile) { return reduce[row_block].partials[epi_tile]; }
    __device__ auto& epi_smem(int row_block, int wg_k) { return reduce[row_block].epi_smem[wg_k]; }
    __device__ static int owner(int epi_tile) { return epi_tile * Config::WG_SPLIT_K / Config::EPI_TILES; }
    // Waits until all warpgroups have read their stages.
    __device__ static void alias_x_stages() {
        bar_sync(FIRST_ROW_BLOCK_BARRIER + Config::ROW_BLOCKS + Config::CONSUMERS, Config::CONSUMER_THREADS);
    }
};

template <class Config>
struct Smem : XSmem<Config>, Config::XScales {
    static constexpr int STAGES = Config::STAGES, ROW_BLOCKS = Config::ROW_BLOCKS;
    static constexpr int BARRIERS_PER_STAGE = Config::BARRIERS_PER_STAGE;
    using State = PipelineState<STAGES>;
    WeightPipeline<Config> weights[ROW_BLOCKS];
    unsigned long long full[BARRIERS_PER_STAGE][STAGES], empty[STAGES], received[ROW_BLOCKS][Config::WG_SPLIT_K];

    // Called by one thread: one lane per barrier would compile to a loop over lanes, 60 clocks each.
    __device__ __forceinline__ void init() {
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            for (auto& barriers : full) mbarrier_init(shared_address(&barriers[stage]), 2);   // producer warps
            mbarrier_init(shared_address(&empty[stage]), ROW_BLOCKS * 4 * Config::ARRIVALS);  // consumer warps
        }
#pragma unroll
        for (int i = 0; i < Config::CONSUMERS; ++i)
            mbarrier_init(shared_address(&received[i % ROW_BLOCKS][i / ROW_BLOCKS]), 1);
#pragma unroll
        for (auto& pipeline : weights) pipeline.init();
        fence_mbarrier_init();
    }
    // The mbarrier at which the bytes of a stage arrive, and the parity of its phase.
    __device__ u32 full_barrier(const State& state) const {
        return shared_address(&full[state.phase % BARRIERS_PER_STAGE][state.stage]);
    }
    __device__ static u32 full_parity(const State& state) { return state.phase / BARRIERS_PER_STAGE & 1; }
};

// The address of Smem in a CTA's dynamic shared memory, after the format's table of levels.
template <class Config>
__device__ __forceinline__ u32 smem_address(const unsigned char* memory) {
    constexpr int TABLE_BYTES = Config::TileFormat::TABLE_BYTES;
    static_assert(TABLE_BYTES + sizeof(Smem<Config>) == Config::SMEM_BYTES,
                  "shared memory differs from the host's SMEM_BYTES");
    // The shuffle keeps ptxas from recomputing the address at every use.
    return __shfl_sync(~0u, shared_address(memory), 0) + TABLE_BYTES;
}

}  // namespace qgemm
