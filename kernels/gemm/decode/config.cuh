// Decode<Config>: the constants that follow from a Config of decode. The headers of this folder are templates over it.
//
// A CTA owns M16_TILES groups of 16 rows of a row_block, or ROW_BLOCKS whole row_blocks, and all of its tokens. GATED:
// the first product is the gate of the second, and the CTA owns the same rows of both, each in one row_block. Intra-CTA
// split-K: its WARP_SPLIT_K warps share the tiles along K round-robin.
// Config:
//   Format, KBlock, K_BLOCKS   the tiles of W
//   Grouping, Mainloop         policies, see policies.cuh
//   In                         the type of x: Activations, float, half, bf16
//   TOKENS                     1, 8 or 16
//   M16_TILES, ROW_BLOCKS      1, 2 or 4; 1 or 2
//   GATED, SUMMED              whether a gate multiplies; whether y is the sum over experts (expert_slots.cuh)
//   WARP_SPLIT_K               warps of a CTA
//   CLUSTER_SPLIT_K            CTAs of a cluster, which share K as well; 1: no cluster
//   STAGES, STAGE_K_BLOCKS     stages of a warp's pipeline; k_blocks of a stage, one or all of a tile
//   PREFETCH                   stages after those of the pipeline that are prefetched into the L2 cache
//   BULK                       whether cp.async.bulk fills the stages (sm_90)
//   CTAS                       CTAs of an SM, at least
//   WARP_BYTES, INBOX_BYTES, REDUCE_BYTES   shared memory of a warp's pipeline, of the sums that CTAs of a cluster send
//                              each other, and of the reduction
//   SLICED, SLICES_BYTES, POINTS_BYTES   slices.cuh: columns of x in slices at a time, shared memory for them, and for
//                              the table of points
#pragma once

#include "ptx/mma.cuh"
#include "tile_config.cuh"

namespace qgemm {

template <class Base>
struct Decode : TileConfig<Base> {
    using Base::K_BLOCKS, Base::STAGE_K_BLOCKS;
    using Base::TOKENS, Base::M16_TILES, Base::ROW_BLOCKS, Base::GATED, Base::WARP_SPLIT_K, Base::CLUSTER_SPLIT_K;
    static_assert(GATED ? ROW_BLOCKS == 2 : ROW_BLOCKS == 1 || M16_TILES == WARPS, "several row_blocks are whole");

    static constexpr int THREADS = WARP_SPLIT_K * 32;
    static constexpr int SPLIT_K = WARP_SPLIT_K * CLUSTER_SPLIT_K;  // warps that share K
    static constexpr int ROW_BLOCK_ROWS = 16 * M16_TILES;           // rows of a row_block that the CTA owns
    static constexpr int ACC_ROWS = ROW_BLOCK_ROWS * ROW_BLOCKS;    // rows of all accumulators
    static constexpr int ROWS = GATED ? ROW_BLOCK_ROWS : ACC_ROWS;  // rows of y
    static constexpr int N8_TILES = (TOKENS + 7) / 8;               // an mma has eight tokens as its columns
    // Rows of x between tokens. A single token is read as all eight columns of its mma.
    static constexpr int TOKEN_STRIDE = TOKENS > 1;

    // Codes of a k_block, and fields of a tile, for the CTA's rows of a row_block.
    using Codes = typename Base::template KBlock<M16_TILES>;
    using Fields = typename Base::template Format<M16_TILES>;
    using RowBlockAcc = Acc[M16_TILES][N8_TILES];
    using WarpAcc = RowBlockAcc[ROW_BLOCKS];

    static constexpr bool WHOLE_TILES = STAGE_K_BLOCKS == K_BLOCKS;  // a stage holds a tile
    static_assert(WHOLE_TILES || STAGE_K_BLOCKS == 1, "a stage holds a k_block or a tile");
    static constexpr int STAGES_OF_TILE = K_BLOCKS / STAGE_K_BLOCKS, STAGE_COLUMNS = STAGE_K_BLOCKS * K_BLOCK;
    static constexpr int STAGE_STEPS = STAGE_COLUMNS / 16;
    static constexpr int STAGE_SCALES =
        TileConfig<Base>::GROUP_SIZE < STAGE_COLUMNS ? STAGE_COLUMNS / TileConfig<Base>::GROUP_SIZE : 1;

    static_assert(ROWS % CLUSTER_SPLIT_K == 0, "CTAs of a cluster store equal numbers of rows");

    // Whether sums of x are multiplied by minimums once a tile, for all groups of a super-block together.
    static constexpr bool SHARED_MINIMUM = Fields::HAS_MINIMUM && Fields::SUPER_BLOCK;
    static constexpr int MINIMUM_PAIRS =
        SHARED_MINIMUM ? TileConfig<Base>::K_BLOCK_SCALES / 2 : 1;  // pairs of groups in a k_block
    static_assert(!SHARED_MINIMUM || (K_BLOCKS == 4 && (MINIMUM_PAIRS == 1 || MINIMUM_PAIRS == 2)),
                  "a lane of a quad has a k_block's sums");
};

}  // namespace qgemm
