// Sm90<Config>: constants that follow from a configuration of prefill_sm90. The headers of sm90/ are templates over it.
//
// Config: Format, KBlock and K_BLOCKS, see tile_config.cuh, and
//   In                        type of x: half; signed char for products of int8, see eight_bits.cuh
//   GROUPED                   rows of x are sorted by expert, see grouped.cuh; then also GATED, and GATE (a GateCode)
//   BLOCK_TOKENS, ROW_BLOCKS  a tile of y: rows of x by row_blocks of 64 rows of W
//   WG_SPLIT_K                consumer warpgroups that share K, for each row_block
//   K_BLOCKS_PER_STAGE, STAGES
//   FIELD_STAGES              stages of the fields of tiles, if a stage holds less than a tile
//   SINGLE_TILE               at most one work tile per CTA: reduction and epilogue alias the pipeline's smem
//   EPI_TOKENS                tokens of an epilogue tile, which is reduced and stored as a whole
//   SMEM_BYTES                dynamic shared memory
//   MAX_PARTIALS              flags of the stream-K workspace
//   ROW_SCALE_LEVEL, ..._HEADROOM, ..._MIN, ..._MAX   see row_exponent.cuh
//   ARRIVALS                  lanes of a warp that arrive to release a stage: 1, or 32 for racecheck, which ignores the
//                             order that __syncwarp establishes
#pragma once

#include "tile_config.cuh"

namespace qgemm {

constexpr int WARPGROUP_THREADS = 128;

constexpr int greatest_common_divisor(int a, int b) { return b ? greatest_common_divisor(b, a % b) : a; }

// Grouping policy. Product: the kernel's parameters; MATRICES: matrices of W in a tile; Y_ROW_BLOCKS: row_blocks of y.
template <class Base, bool GROUPED = Base::GROUPED>
struct Grouping {
    using Product = DenseProduct;
    static constexpr int MATRICES = 1, Y_ROW_BLOCKS = Base::ROW_BLOCKS;
};
template <class Base>
struct Grouping<Base, true> {
    using Product = GroupedProducts;
    static constexpr int MATRICES = Base::GATED ? 2 : 1;  // the gate and the product that it gates
    static constexpr int Y_ROW_BLOCKS = Base::ROW_BLOCKS / MATRICES;
    static_assert(Base::ROW_BLOCKS % MATRICES == 0, "each row_block of the gate has one that it gates");
    static_assert(!Base::SINGLE_TILE, "only the device knows the number of tiles");
};

template <class Base>
struct Sm90 : TileConfig<Base>, Grouping<Base> {
    using Base::BLOCK_TOKENS, Base::ROW_BLOCKS, Base::WG_SPLIT_K, Base::K_BLOCKS, Base::K_BLOCKS_PER_STAGE,
        Base::STAGES;

    static constexpr int CONSUMERS = ROW_BLOCKS * WG_SPLIT_K;  // warpgroups
    static constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP_THREADS;
    static constexpr int THREADS = CONSUMER_THREADS + WARPGROUP_THREADS;

    // Registers per thread: at launch, then of the producer warpgroup and of the consumers, who share the same total.
    static constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8, PRODUCER_REGISTERS = 32;
    static constexpr int CONSUMER_REGISTERS =
        (LAUNCH_REGISTERS * (CONSUMERS + 1) - PRODUCER_REGISTERS) / CONSUMERS / 8 * 8;

    // Roles of the producer warpgroup: a warp loads W, one loads x, one initialises mbarriers.
    static constexpr int WARP_LOAD_W = CONSUMERS * 4, WARP_LOAD_X = WARP_LOAD_W + 1, WARP_INIT = WARP_LOAD_W + 2;

    // Stages hold whole tiles, or the fields of a tile have stages of their own.
    static constexpr bool WHOLE_TILES = K_BLOCKS_PER_STAGE % K_BLOCKS == 0;
    static_assert(WHOLE_TILES || K_BLOCKS % K_BLOCKS_PER_STAGE == 0,
                  "a stage holds whole tiles, or a tile whole stages");
    // k_blocks of a work unit: stream-K splits a tile of y between work units.
    static constexpr int WORK_UNIT = WHOLE_TILES ? K_BLOCKS_PER_STAGE : K_BLOCKS;

    // A wait on parity can tell only the last two phases of an mbarrier apart, so a waiter must have seen the phase
    // before. If a stage is filled for a different warpgroup along K each time, it has an mbarrier for each of them.
    static constexpr int BARRIERS_PER_STAGE = WG_SPLIT_K / greatest_common_divisor(STAGES, WG_SPLIT_K);

    // A box of x: the 128 bytes of a row that a tensor map swizzles, as columns and as k_blocks.
    static constexpr int X_COLUMNS = 128 / sizeof(typename Base::In), X_K_BLOCKS = X_COLUMNS / K_BLOCK;
    // Products of int8 (eight_bits.cuh): x is padded to whole token tiles, and stages hold its scales.
    static constexpr bool EIGHT_BITS = false;
    struct XScales {};

    static constexpr int EPI_TILES = BLOCK_TOKENS / Base::EPI_TOKENS;
    static constexpr int EPI_QUADS = Base::EPI_TOKENS / 8;  // float4 of accumulators per thread and epilogue tile
    static constexpr int ACC_SIZE = BLOCK_TOKENS / 2;       // accumulators per thread
    using Acc = float[ACC_SIZE];
};

// Named barriers; 0 belongs to __syncthreads.
enum : int { FIRST_ROW_BLOCK_BARRIER = 1, X_BATCH_BARRIER = 14, INIT_BARRIER = 15 };

}  // namespace qgemm
