// gemm_sm90_s8: its tiles of y, shared memory, and the producer warps. Both factors are bytes that TMA and bulk copies
// bring as wgmma reads them, in two pipelines: W with ROW_BLOCKS * 64 rows and x with HALF tokens a stage, each of the
// EIGHT_BIT_COLUMNS that share a scale of W. The two CTAs of a cluster have different rows of W and the same tokens:
// each loads half of a stage of x and sends it to both.
//
// Config: E4M3 (whether bytes are e4m3 floats), TOKENS, HALF (tokens of a stage of x, whose sums of a group a warpgroup has at a
// time), X_GROUP (columns of x that share a scale), EPI_TILE, W_STAGES, X_STAGES, SMEM_BYTES, ARRIVALS (as in config.cuh).
#pragma once

#include "../ptx/cluster.cuh"
#include "../ptx/cp_async_bulk_tensor.cuh"
#include "../ptx/elect_sync.cuh"
#include "../ptx/griddepcontrol.cuh"
#include "eight_bit_layout.cuh"
#include "store.cuh"

namespace qgemm {

template <class Base>
struct S8Gemm : Base {
    using Base::TOKENS, Base::X_GROUP;
    static constexpr int CLUSTER = 2;                                    // CTAs that share tokens
    static constexpr int ROW_BLOCKS = 2, ROWS = ROW_BLOCKS * TILE_ROWS;  // of a CTA, a warpgroup for each row_block
    static constexpr int THREADS = (ROW_BLOCKS + 1) * WARPGROUP_THREADS;
    static constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 32;
    static constexpr int WARP_LOAD_W = ROW_BLOCKS * 4, WARP_LOAD_X = WARP_LOAD_W + 1;
    static constexpr int HALF = Base::HALF, HALVES = TOKENS / HALF;
    static constexpr int BOX = 128, BOXES = EIGHT_BIT_COLUMNS / BOX;  // columns that are swizzled together
    static constexpr int GROUPS = EIGHT_BIT_COLUMNS / X_GROUP, GROUP_BOXES = BOXES / GROUPS;
    static constexpr int ROW_TILES_TOGETHER = 8;  // clusters along N before the next tokens: both factors stay in L2
    static_assert(TOKENS % HALF == 0 && BOXES % GROUPS == 0, "halves and groups are whole");

    // As Warpgroup and EpilogueStore ask for them.
    static constexpr int WG_SPLIT_K = 1, EPI_TILES = TOKENS / Base::EPI_TILE, ACC_SIZE = TOKENS / 2;
    static constexpr bool SINGLE_TILE = false, GROUPED = false;
    using Acc = float[ACC_SIZE];
};

template <class Base>
struct Smem<S8Gemm<Base>> {
    using Config = S8Gemm<Base>;
    static constexpr int W_STAGES = Config::W_STAGES, X_STAGES = Config::X_STAGES, ROW_BLOCKS = Config::ROW_BLOCKS;
    signed char w[W_STAGES][ROW_BLOCKS][Config::BOXES][TILE_ROWS][Config::BOX];  // swizzled, as x
    signed char x[X_STAGES][Config::BOXES][Config::HALF][Config::BOX];
    EpilogueSmem<Config> epilogue[ROW_BLOCKS];
    float w_scales[W_STAGES][ROW_BLOCKS][TILE_ROWS], x_scales[X_STAGES][Config::GROUPS][Config::HALF];
    unsigned long long w_full[W_STAGES], w_empty[W_STAGES], x_full[X_STAGES], x_empty[X_STAGES];

    __device__ auto& epi_smem(int row_block, int) { return epilogue[row_block]; }
    __device__ static int owner(int) { return 0; }
    // By one thread. Consumer warps of both CTAs read what either loads of x.
    __device__ void init() {
        constexpr int READERS = 4 * ROW_BLOCKS * Config::ARRIVALS;
        for (auto& barrier : w_full) mbarrier_init(shared_address(&barrier), 1);
        for (auto& barrier : x_full) mbarrier_init(shared_address(&barrier), 1);
        for (auto& barrier : w_empty) mbarrier_init(shared_address(&barrier), READERS);
        for (auto& barrier : x_empty) mbarrier_init(shared_address(&barrier), READERS * Config::CLUSTER);
        fence_mbarrier_init();
    }
};

// A stage of a pipeline and the parity of how often it has been filled before. A producer waits for the other parity,
// which an mbarrier has at first.
template <int STAGES>
struct Ring {
    int stage = 0;
    u32 phase = 0;

    __device__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// Tiles of y that clusters go through: CLUSTER * ROWS rows of W by TOKENS.
struct S8Tiles {
    int row_tiles, token_tiles;

    __device__ int count() const { return row_tiles * token_tiles; }
};

// The tile of y of a CTA. first_row_block: of all of W; number: of its rows among those in the workspace.
template <class Base>
struct Problem<S8Gemm<Base>, false> {
    using Config = S8Gemm<Base>;
    i64 n;
    int m, number, token, from_row_block, loaded;

    __device__ Problem(i64 n, int m, int x_rows, int from_row_block, const S8Tiles& tiles, int tile)
        : n(n), m(m), from_row_block(from_row_block) {
        constexpr int TOGETHER = Config::ROW_TILES_TOGETHER;
        const int group = tile / (TOGETHER * tiles.token_tiles), of = tile - group * TOGETHER * tiles.token_tiles;
        const int across = min(TOGETHER, tiles.row_tiles - group * TOGETHER);
        number = (group * TOGETHER + of % across) * Config::CLUSTER + int(blockIdx.x % Config::CLUSTER);
        token = of / across * Config::TOKENS;
        loaded = min(token, max(x_rows - Config::TOKENS, 0));  // the last box is moved back to end with x
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
    int x_rows, stages;  // stages: along K
};

template <class Config>
struct S8Producer {
    Smem<Config>& smem;
    const S8Operands& from;

    __device__ void load_w(const Problem<Config>& at, Ring<Config::W_STAGES>& ring) const {
        for (int j = 0; j < from.stages; ++j, ring.advance()) {
            mbarrier_wait_parity(shared_address(&smem.w_empty[ring.stage]), ring.phase ^ 1);
            if (!elect_sync()) continue;
            const u32 full = shared_address(&smem.w_full[ring.stage]);
            const i64 number = i64(at.number) * from.stages + j;
            mbarrier_arrive_expect_tx(full, sizeof(smem.w[0]) + sizeof(smem.w_scales[0]));
            cp_async_bulk(shared_address(smem.w[ring.stage]), from.w + number * sizeof(smem.w[0]), sizeof(smem.w[0]),
                          full);
            cp_async_bulk(shared_address(smem.w_scales[ring.stage]), from.w_scales + number * Config::ROWS,
                          sizeof(smem.w_scales[0]), full);
        }
    }
    __device__ void load_x(const Problem<Config>& at, Ring<Config::X_STAGES>& ring) const {
        constexpr int SHARE = Config::HALF / Config::CLUSTER;  // tokens that this CTA sends to both
        const int rank = int(blockIdx.x % Config::CLUSTER);
        for (int j = 0; j < from.stages; ++j)
#pragma unroll 1
            for (int half = 0; half < Config::HALVES; ++half, ring.advance()) {
                mbarrier_wait_parity(shared_address(&smem.x_empty[ring.stage]), ring.phase ^ 1);
                if (!elect_sync()) continue;
                const u32 full = shared_address(&smem.x_full[ring.stage]);
                const int token = at.loaded + half * Config::HALF;
                mbarrier_arrive_expect_tx(full, sizeof(smem.x[0]) + sizeof(smem.x_scales[0]));
#pragma unroll
                for (int box = 0; box < Config::BOXES; ++box)
                    tma_load_2d_multicast(shared_address(smem.x[ring.stage][box][rank * SHARE]), from.x,
                                          token + rank * SHARE, (j * Config::BOXES + box) * Config::BOX, full,
                                          (1 << Config::CLUSTER) - 1);
#pragma unroll
                for (int group = 0; group < Config::GROUPS; ++group)
                    cp_async_bulk(shared_address(smem.x_scales[ring.stage][group]),
                                  from.x_scales + i64(j * Config::GROUPS + group) * from.x_rows + token,
                                  sizeof(smem.x_scales[0][0]), full);
            }
    }
};

}  // namespace qgemm
