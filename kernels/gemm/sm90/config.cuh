// Sm90<Config>: constants that follow from a configuration of prefill_sm90. The headers of sm90/ are templates over it.
//
// Config: Format, KBlock, K_BLOCKS; In (half, bf16), TOKENS, ROW_BLOCKS, WG_SPLIT_K, K_BLOCKS_PER_STAGE, STAGES,
// FIELD_STAGES (stages of fields, where a stage is less than a tile), SINGLE_TILE (at most one work tile per CTA, so
// that reduction and epilogue alias the pipeline's smem), EPI_TILE (tokens reduced and stored at a time), SMEM_BYTES
// (dynamic shared memory), MAX_PARTIALS, ROW_SCALE_LEVEL, ROW_SCALE_HEADROOM, ROW_SCALE_MIN, ROW_SCALE_MAX
// (row_exponent.cuh), ARRIVALS (lanes of a warp that arrive to release a stage: 1, or 32 for racecheck, which does not
// see the order that __syncwarp makes).
#pragma once

#include "tile_config.cuh"

namespace qgemm {

constexpr int WARPGROUP_THREADS = 128;

constexpr int greatest_common_divisor(int a, int b) { return b ? greatest_common_divisor(b, a % b) : a; }

template <class Base>
struct Sm90 : TileConfig<Base> {
    using Base::TOKENS, Base::ROW_BLOCKS, Base::WG_SPLIT_K, Base::K_BLOCKS, Base::K_BLOCKS_PER_STAGE, Base::STAGES;

    static constexpr int CONSUMERS = ROW_BLOCKS * WG_SPLIT_K;  // warpgroups
    static constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP_THREADS;
    static constexpr int THREADS = CONSUMER_THREADS + WARPGROUP_THREADS;

    // Registers per thread at launch, then of the producer warpgroup and of consumers, who share them.
    static constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8, PRODUCER_REGISTERS = 32;
    static constexpr int CONSUMER_REGISTERS =
        (LAUNCH_REGISTERS * (CONSUMERS + 1) - PRODUCER_REGISTERS) / CONSUMERS / 8 * 8;

    // Roles of the warps beside the consumers: loading W, loading x, initialising mbarriers.
    static constexpr int WARP_LOAD_W = CONSUMERS * 4, WARP_LOAD_X = WARP_LOAD_W + 1, WARP_INIT = WARP_LOAD_W + 2;

    // Whether stages hold whole tiles; otherwise a tile's fields have stages of their own.
    static constexpr bool WHOLE_TILES = K_BLOCKS_PER_STAGE % K_BLOCKS == 0;
    static_assert(WHOLE_TILES || K_BLOCKS % K_BLOCKS_PER_STAGE == 0,
                  "a stage holds whole tiles, or a tile whole stages");
    // k_blocks at whose multiples a tile of y may be split.
    static constexpr int WORK_UNIT = WHOLE_TILES ? K_BLOCKS_PER_STAGE : K_BLOCKS;

    // A wait on parity can tell only the last two phases of an mbarrier apart, so a waiter must have seen the phase
    // before. A stage filled for a different warpgroup along K each time therefore has an mbarrier for each of them.
    static constexpr int BARRIERS_PER_STAGE = WG_SPLIT_K / greatest_common_divisor(STAGES, WG_SPLIT_K);

    // Columns of a box of x, the 128 bytes of a row that a tensor map swizzles, and the k_blocks in them.
    static constexpr int X_COLUMNS = 128 / sizeof(typename Base::In), X_K_BLOCKS = X_COLUMNS / K_BLOCK;
    // Whether both factors are multiplied as eight bits, see eight_bits.cuh: then x has rows for all of the last token
    // tile, and stages hold its scales.
    static constexpr bool EIGHT_BITS = false;
    struct XScales {};

    // Whether rows of x are sorted by expert, of which each tile of y has one; see grouped.cuh.
    static constexpr bool GROUPED = false;
    static constexpr int Y_ROW_BLOCKS = ROW_BLOCKS;  // row_blocks of y in a tile

    static constexpr int EPI_TILES = TOKENS / Base::EPI_TILE;
    static constexpr int EPI_QUADS = Base::EPI_TILE / 8;  // float4 of accumulators per thread and epilogue tile
    static constexpr int ACC_SIZE = TOKENS / 2;           // accumulators per thread
    using Acc = float[ACC_SIZE];
};

// Named barriers: 0 is __syncthreads'.
enum : int { FIRST_ROW_BLOCK_BARRIER = 1, X_TURN_BARRIER = 14, INIT_BARRIER = 15 };

}  // namespace qgemm
