// gemm_sm90_s8: its tiles of y, shared memory, and the warp that loads. Both factors are bytes that TMA and bulk copies
// bring as wgmma reads them, in two pipelines: W with ROW_BLOCKS * 64 rows and x with HALF tokens a stage, each of the
// EIGHT_BIT_COLUMNS that share a scale of W. The two CTAs of a cluster have different rows of W and the same tokens:
// each loads half of a stage of x and sends it to both.
//
// Config: E4M3 (whether bytes are e4m3 floats), TOKENS, HALF (tokens of a stage of x, whose sums of a group a warpgroup
// has at a time), X_GROUP (columns of x that share a scale), EPI_TILE, W_STAGES, X_STAGES, SMEM_BYTES, ARRIVALS (as in
// config.cuh), MAKERS (warps that make the bytes of W meanwhile, see maker.cuh; 0: they are there).
#pragma once

#include "ptx/cluster.cuh"
#include "ptx/cp_async_bulk_tensor.cuh"
#include "ptx/elect_sync.cuh"
#include "ptx/flag.cuh"
#include "ptx/griddepcontrol.cuh"
#include "s8_tiles.cuh"
#include "store.cuh"

namespace qgemm {

template <class Base>
struct S8Gemm : Base {
    using Given = Base;
    using Base::TOKENS, Base::X_GROUP;
    static constexpr int CLUSTER = 2;                                    // CTAs that share tokens
    static constexpr int ROW_BLOCKS = 2, ROWS = ROW_BLOCKS * TILE_ROWS;  // of a CTA, a warpgroup for each row_block
    static constexpr int THREADS = (ROW_BLOCKS + (1 + Base::MAKERS + 3) / 4) * WARPGROUP_THREADS;
    static constexpr int CONSUMER_REGISTERS = Base::MAKERS ? 216 : 232, PRODUCER_REGISTERS = 40;
    static constexpr int WARP_LOAD = ROW_BLOCKS * 4;  // the makers are the warps behind it
    static constexpr int HALF = Base::HALF, HALVES = TOKENS / HALF;
    static constexpr int BOX = 128, BOXES = EIGHT_BIT_COLUMNS / BOX;  // columns that are swizzled together
    static constexpr int GROUPS = EIGHT_BIT_COLUMNS / X_GROUP, GROUP_BOXES = BOXES / GROUPS;
    static_assert(TOKENS % HALF == 0 && BOXES % GROUPS == 0, "halves and groups are whole");

    // As Warpgroup and EpilogueStore ask for them.
    static constexpr int WG_SPLIT_K = 1, EPI_TILES = TOKENS / Base::EPI_TILE, ACC_SIZE = TOKENS / 2;
    static constexpr bool SINGLE_TILE = false, GROUPED = false;
    using Acc = float[ACC_SIZE];
};

// What makers and loaders of a grid know of each other, behind the bytes of W; zeros at first. The last that leaves
// makes it ready for the next launch, whose flags have another value: those of this launch stay as they are.
struct Made {
    u32 epoch, tickets, left;
    alignas(128) u32 flags[1];  // of units, as they lie in the workspace

    // The value of a flag that is raised in this launch; by who has not left.
    __device__ u32 next_epoch() const { return __ldcg(&epoch) + 1; }
    __device__ void leave(u32 all) {
        if (atom_inc_relaxed_gpu(&left, all - 1) != all - 1) return;
        tickets = 0, epoch += 1;
        fence_acq_rel_gpu();
    }
};

// A box of each maker: 16 rows of 128 columns.
template <int MAKERS, int BYTES>
struct StagedBoxes {
    signed char staged[MAKERS][BYTES];
};
template <int BYTES>
struct StagedBoxes<0, BYTES> {};

template <class Base>
struct alignas(16) Smem<S8Gemm<Base>> : StagedBoxes<Base::MAKERS, 16 * S8Gemm<Base>::BOX> {
    using Config = S8Gemm<Base>;
    static constexpr int W_STAGES = Config::W_STAGES, X_STAGES = Config::X_STAGES, ROW_BLOCKS = Config::ROW_BLOCKS;
    signed char w[W_STAGES][ROW_BLOCKS][Config::BOXES][TILE_ROWS][Config::BOX];  // swizzled, as x
    signed char x[X_STAGES][Config::BOXES][Config::HALF][Config::BOX];
    EpilogueSmem<Config> epilogue[ROW_BLOCKS];
    float w_scales[W_STAGES][ROW_BLOCKS][TILE_ROWS], x_scales[X_STAGES][Config::GROUPS][Config::HALF];
    unsigned long long w_full[W_STAGES], w_empty[W_STAGES], x_full[X_STAGES], x_empty[X_STAGES], left, quantized;

    __device__ auto& epi_smem(int row_block, int) { return epilogue[row_block]; }
    __device__ static int owner(int) { return 0; }
    // By one thread. Consumer warps of both CTAs read what either loads of x.
    __device__ void init() {
        constexpr int READERS = 4 * ROW_BLOCKS * Config::ARRIVALS;
        for (auto& barrier : w_full) mbarrier_init(shared_address(&barrier), 1);
        for (auto& barrier : x_full) mbarrier_init(shared_address(&barrier), 1);
        for (auto& barrier : w_empty) mbarrier_init(shared_address(&barrier), READERS);
        for (auto& barrier : x_empty) mbarrier_init(shared_address(&barrier), READERS * Config::CLUSTER);
        mbarrier_init(shared_address(&left), 1 + Config::MAKERS);
        mbarrier_init(shared_address(&quantized), 4 * ROW_BLOCKS);
        fence_mbarrier_init();
    }
    // By a thread of the warp that loads and of each maker, once it needs `made` no more.
    __device__ void leave(Made& made) {
        made.leave(gridDim.x * (1 + Config::MAKERS));
        mbarrier_arrive(shared_address(&left));
    }
};

// A place in a pipeline, of which a number of stages have been used before: its stage, and the parity of how often that
// has been filled. A producer waits for the other parity, which an mbarrier has at first.
template <int STAGES>
struct Ring {
    u32 used;

    __device__ u32 stage() const { return used % STAGES; }
    __device__ u32 phase() const { return used / STAGES % 2; }
    __device__ void advance() { ++used; }
};

// The tile of y of a CTA. number: of its rows among those in the workspace.
template <class Base>
struct Problem<S8Gemm<Base>, false> {
    using Config = S8Gemm<Base>;
    i64 n;
    int m, from_row_block, number, token, halves, loaded;

    __device__ Problem(const S8Sizes& size, int tile_number)
        : n(size.n), m(size.m), from_row_block(size.first_row_block) {
        const auto tile = S8Tile::at(size, tile_number);
        number = tile.row_tile * Config::CLUSTER + int(blockIdx.x % Config::CLUSTER);
        token = tile.token_tile * Config::TOKENS + tile.half * Config::HALF, halves = tile.halves;
        loaded = min(token, max(size.x_rows - halves * Config::HALF, 0));  // the last box is moved back to end with x
    }
    __device__ int first_token(int) const { return token; }
    __device__ int first_loaded(int) const { return loaded; }
    __device__ int end_token(int) const { return m; }
    __device__ i64 row_block(int, int row_block) const {
        return from_row_block + i64(number) * Config::ROW_BLOCKS + row_block;
    }
};

// W as requantize writes it: of each ROWS rows and EIGHT_BIT_COLUMNS what a stage holds; scales: in the same order.
// x: the map of its bytes, boxes of HALF / CLUSTER tokens; x_scales: [groups along K][x_rows].
struct S8Operands {
    const signed char* w;
    const float* w_scales;
    const TensorMap* x;
    const float* x_scales;
    Made* made;
    u32 epoch;  // of `made`
    int x_rows, stages;
};

template <class Config>
struct S8Producer {
    Smem<Config>& smem;
    const S8Operands& from;

    // All stages of a tile, in the order in which they are used; what waits for makers keeps no x from being there.
    __device__ void load(const Problem<Config>& at, Ring<Config::W_STAGES>& w_ring,
                         Ring<Config::X_STAGES>& x_ring) const {
        for (int j = 0; j < from.stages; ++j, w_ring.advance()) {
            load_x(at, j, 0, x_ring);
            if constexpr (Config::MAKERS) await_makers(i64(at.number) * from.stages + j);
            load_w(i64(at.number) * from.stages + j, w_ring);
#pragma unroll 1
            for (int half = 1; half < at.halves; ++half) load_x(at, j, half, x_ring);
        }
    }

private:
    // number: of a stage, as they lie in the workspace.
    __device__ void await_makers(i64 number) const {
        constexpr int UNITS = Config::ROWS / 16;
        const int lane = threadIdx.x % 32;
        while (
            !__all_sync(~0u, lane >= UNITS || ld_acquire_gpu(&from.made->flags[number * UNITS + lane]) == from.epoch)) {
        }
        fence_proxy_async_global();
    }
    __device__ void load_w(i64 number, const Ring<Config::W_STAGES>& ring) const {
        mbarrier_wait_parity(shared_address(&smem.w_empty[ring.stage()]), ring.phase() ^ 1);
        if (!elect_sync()) return;
        const u32 full = shared_address(&smem.w_full[ring.stage()]);
        mbarrier_arrive_expect_tx(full, sizeof(smem.w[0]) + sizeof(smem.w_scales[0]));
        cp_async_bulk(shared_address(smem.w[ring.stage()]), from.w + number * sizeof(smem.w[0]), sizeof(smem.w[0]),
                      full);
        cp_async_bulk(shared_address(smem.w_scales[ring.stage()]), from.w_scales + number * Config::ROWS,
                      sizeof(smem.w_scales[0]), full);
    }
    __device__ void load_x(const Problem<Config>& at, int j, int half, Ring<Config::X_STAGES>& ring) const {
        constexpr int SHARE = Config::HALF / Config::CLUSTER;  // tokens that this CTA sends to both
        const int rank = int(blockIdx.x % Config::CLUSTER), token = at.loaded + half * Config::HALF;
        mbarrier_wait_parity(shared_address(&smem.x_empty[ring.stage()]), ring.phase() ^ 1);
        if (elect_sync()) {
            const u32 full = shared_address(&smem.x_full[ring.stage()]);
            mbarrier_arrive_expect_tx(full, sizeof(smem.x[0]) + sizeof(smem.x_scales[0]));
#pragma unroll
            for (int box = 0; box < Config::BOXES; ++box)
                tma_load_2d_multicast(shared_address(smem.x[ring.stage()][box][rank * SHARE]), from.x,
                                      token + rank * SHARE, (j * Config::BOXES + box) * Config::BOX, full,
                                      (1 << Config::CLUSTER) - 1);
#pragma unroll
            for (int group = 0; group < Config::GROUPS; ++group)
                cp_async_bulk(shared_address(smem.x_scales[ring.stage()][group]),
                              from.x_scales + i64(j * Config::GROUPS + group) * from.x_rows + token,
                              sizeof(smem.x_scales[0][0]), full);
        }
        ring.advance();
    }
};

}  // namespace qgemm
