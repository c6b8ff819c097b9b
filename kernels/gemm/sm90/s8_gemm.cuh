// gemm_sm90_s8: configuration, shared memory, tile of y and producer warp.
//
// Both operands are bytes in the layout that wgmma reads. They come through two pipelines: stages of W with the ROWS
// rows of a CTA, by bulk copies, and stages of x with ACC_TOKENS tokens, by TMA. A stage has the EIGHT_BIT_COLUMNS that
// share a scale of W and one of x. The two CTAs of a cluster have different rows of W and the same tokens: each loads
// half of every stage of x and multicasts it to both.
//
// Config:
//   E4M3                e4m3 floats instead of int8
//   BLOCK_TOKENS        tokens of a tile of y
//   ACC_TOKENS          tokens of a pass, whose sums over a stage a warpgroup holds at a time
//   EPI_TOKENS          tokens of an epilogue tile
//   W_STAGES, X_STAGES
//   REQUANTIZERS        warps that convert W meanwhile (requantizer.cuh); 0: its bytes are ready
//   SMEM_BYTES, ARRIVALS  as in config.cuh
#pragma once

#include "ptx/cluster.cuh"
#include "ptx/cp_async_bulk_tensor.cuh"
#include "ptx/elect_sync.cuh"
#include "ptx/griddepcontrol.cuh"
#include "pipeline_state.cuh"
#include "s8_order.cuh"
#include "store.cuh"
#include "work_queue.cuh"

namespace qgemm {

template <class Base>
struct S8Gemm : Base {
    using Given = Base;
    using Base::BLOCK_TOKENS, Base::ACC_TOKENS;
    static constexpr int CLUSTER = 2;                                    // CTAs that share tokens
    static constexpr int ROW_BLOCKS = 2, ROWS = ROW_BLOCKS * TILE_ROWS;  // per CTA; a warpgroup has one row_block
    static constexpr int THREADS = (ROW_BLOCKS + (1 + Base::REQUANTIZERS + 3) / 4) * WARPGROUP_THREADS;
    static constexpr int CONSUMER_REGISTERS = Base::REQUANTIZERS ? 216 : 232, PRODUCER_REGISTERS = 40;
    static constexpr int WARP_LOAD = ROW_BLOCKS * 4, WARP_REQUANTIZE = WARP_LOAD + 1;
    static constexpr int PASSES = BLOCK_TOKENS / ACC_TOKENS;
    static constexpr int BOX = 128, BOXES = EIGHT_BIT_COLUMNS / BOX;  // columns that are swizzled together
    static_assert(BLOCK_TOKENS % ACC_TOKENS == 0, "passes are whole");

    // Required by Warpgroup and EpilogueStore.
    static constexpr int WG_SPLIT_K = 1, EPI_TILES = BLOCK_TOKENS / Base::EPI_TOKENS, ACC_SIZE = BLOCK_TOKENS / 2;
    static constexpr bool SINGLE_TILE = false;
    using Acc = float[ACC_SIZE];
};

// The staging buffer of each requantizer warp: 16 rows of a box.
template <int REQUANTIZERS, int BYTES>
struct StagedBoxes {
    signed char staged[REQUANTIZERS][BYTES];
};
template <int BYTES>
struct StagedBoxes<0, BYTES> {};

template <class Base>
struct alignas(16) Smem<S8Gemm<Base>> : StagedBoxes<Base::REQUANTIZERS, 16 * S8Gemm<Base>::BOX> {
    using Config = S8Gemm<Base>;
    static constexpr int W_STAGES = Config::W_STAGES, X_STAGES = Config::X_STAGES, ROW_BLOCKS = Config::ROW_BLOCKS;
    signed char w[W_STAGES][ROW_BLOCKS][Config::BOXES][TILE_ROWS][Config::BOX];  // swizzled, as x
    signed char x[X_STAGES][Config::BOXES][Config::ACC_TOKENS][Config::BOX];
    EpilogueSmem<Config> epilogue[ROW_BLOCKS];
    float w_scales[W_STAGES][ROW_BLOCKS][TILE_ROWS], x_scales[X_STAGES][Config::ACC_TOKENS];
    unsigned long long w_full[W_STAGES], w_empty[W_STAGES], x_full[X_STAGES], x_empty[X_STAGES];
    unsigned long long queue_exited, x_quantized;

    __device__ auto& epi_smem(int row_block, int) { return epilogue[row_block]; }
    __device__ static int owner(int) { return 0; }
    // Called by one thread. Consumer warps of both CTAs read each stage of x.
    __device__ void init() {
        constexpr int READERS = 4 * ROW_BLOCKS * Config::ARRIVALS;
        for (auto& barrier : w_full) mbarrier_init(shared_address(&barrier), 1);
        for (auto& barrier : x_full) mbarrier_init(shared_address(&barrier), 1);
        for (auto& barrier : w_empty) mbarrier_init(shared_address(&barrier), READERS);
        for (auto& barrier : x_empty) mbarrier_init(shared_address(&barrier), READERS * Config::CLUSTER);
        mbarrier_init(shared_address(&queue_exited), 1 + Config::REQUANTIZERS);
        mbarrier_init(shared_address(&x_quantized), 4 * ROW_BLOCKS);
        fence_mbarrier_init();
    }
    // Called by a thread of the producer and of each requantizer warp when it no longer needs the queue of W. The last
    // one of the grid starts the next epoch.
    __device__ void exit(WorkQueue& queue) {
        if (queue.exit_last(gridDim.x * (1 + Config::REQUANTIZERS))) {
            queue.next = 0, queue.epoch += 1;
            fence_acq_rel_gpu();
        }
        mbarrier_arrive(shared_address(&queue_exited));
    }
};

// A CTA's tile of y: its own ROWS rows of a ClusterTile. index: number of these rows in the workspace.
template <class Config>
struct S8CtaTile {
    i64 n;
    int m, first_w_row_block, index, token, passes, loaded;

    __device__ S8CtaTile(const S8Sizes& size, int cluster_tile)
        : n(size.n), m(size.m), first_w_row_block(size.first_row_block) {
        const auto tile = ClusterTile::numbered(size, cluster_tile);
        index = tile.row_tile * Config::CLUSTER + int(blockIdx.x % Config::CLUSTER);
        token = tile.token_tile * Config::BLOCK_TOKENS + tile.first_pass * Config::ACC_TOKENS, passes = tile.passes;
        // The last box is moved back to end with x: boxes that reach beyond the matrix are slow.
        loaded = min(token, max(size.x_rows - passes * Config::ACC_TOKENS, 0));
    }
    __device__ int first_token(int) const { return token; }
    __device__ int first_loaded(int) const { return loaded; }
    __device__ int end_token(int) const { return m; }
    __device__ i64 row_block(int, int row_block) const {
        return first_w_row_block + i64(index) * Config::ROW_BLOCKS + row_block;
    }
};
template <class Base>
struct ProblemOf<S8Gemm<Base>> {
    using Type = S8CtaTile<S8Gemm<Base>>;
};

// Operands in global memory.
//   w, w_scales  bytes in the order of stages, as requantize.cu writes them: [ROWS rows][stage]; scales alike
//   x            tensor map of the bytes, boxes of ACC_TOKENS / CLUSTER tokens
//   x_scales     [groups along K][x_rows]
//   queue        of requantizer items; epoch: value of their ready flags
struct S8Operands {
    const signed char* w;
    const float* w_scales;
    const TensorMap* x;
    const float* x_scales;
    WorkQueue* queue;
    u32 epoch;
    int x_rows, stages;
};

template <class Config>
struct S8Producer {
    using WState = CountedPipelineState<Config::W_STAGES>;
    using XState = CountedPipelineState<Config::X_STAGES>;
    Smem<Config>& smem;
    const S8Operands& operands;

    // Loads all stages of a tile in the order of use. x of the first pass loads before the wait for requantized W.
    __device__ void load(const S8CtaTile<Config>& tile, WState& w_state, XState& x_state) const {
        for (int j = 0; j < operands.stages; ++j, w_state.advance()) {
            load_x(tile, j, 0, x_state);
            if constexpr (Config::REQUANTIZERS) await_requantized(i64(tile.index) * operands.stages + j);
            load_w(i64(tile.index) * operands.stages + j, w_state);
#pragma unroll 1
            for (int pass = 1; pass < tile.passes; ++pass) load_x(tile, j, pass, x_state);
        }
    }

private:
    // Waits for the ready flags of a stage. index: of the stage in the workspace.
    __device__ void await_requantized(i64 index) const {
        constexpr int ITEMS = Config::ROWS / 16;
        const int lane = threadIdx.x % 32;
        const u32* flags = operands.queue->ready_flags() + index * ITEMS;
        while (!__all_sync(~0u, lane >= ITEMS || ld_acquire_gpu(&flags[lane]) == operands.epoch)) {
        }
        fence_proxy_async_global();
    }
    __device__ void load_w(i64 index, const WState& state) const {
        mbarrier_wait_parity(shared_address(&smem.w_empty[state.stage()]), state.parity() ^ 1);
        if (!elect_sync()) return;
        const u32 full = shared_address(&smem.w_full[state.stage()]);
        mbarrier_arrive_expect_tx(full, sizeof(smem.w[0]) + sizeof(smem.w_scales[0]));
        cp_async_bulk(shared_address(smem.w[state.stage()]), operands.w + index * sizeof(smem.w[0]), sizeof(smem.w[0]),
                      full);
        cp_async_bulk(shared_address(smem.w_scales[state.stage()]), operands.w_scales + index * Config::ROWS,
                      sizeof(smem.w_scales[0]), full);
    }
    __device__ void load_x(const S8CtaTile<Config>& tile, int j, int pass, XState& state) const {
        constexpr int SHARE = Config::ACC_TOKENS / Config::CLUSTER;  // tokens that this CTA multicasts
        const int rank = int(blockIdx.x % Config::CLUSTER), token = tile.loaded + pass * Config::ACC_TOKENS;
        mbarrier_wait_parity(shared_address(&smem.x_empty[state.stage()]), state.parity() ^ 1);
        if (elect_sync()) {
            const u32 full = shared_address(&smem.x_full[state.stage()]);
            mbarrier_arrive_expect_tx(full, sizeof(smem.x[0]) + sizeof(smem.x_scales[0]));
#pragma unroll
            for (int box = 0; box < Config::BOXES; ++box)
                tma_load_2d_multicast(shared_address(smem.x[state.stage()][box][rank * SHARE]), operands.x,
                                      token + rank * SHARE, (j * Config::BOXES + box) * Config::BOX, full,
                                      (1 << Config::CLUSTER) - 1);
            cp_async_bulk(shared_address(smem.x_scales[state.stage()]),
                          operands.x_scales + i64(j) * operands.x_rows + token, sizeof(smem.x_scales[0]), full);
        }
        state.advance();
    }
};

}  // namespace qgemm
