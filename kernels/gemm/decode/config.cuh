// What follows from a configuration of the decode kernels; the headers of decode/ are templates over Decode<Config>.
//
// A CTA owns M16_TILES groups of 16 rows of a row_block, or ROW_BLOCKS whole row_blocks, and all tokens. GATED: the
// first product is the gate of the second, and the CTA owns the same rows of both, each of a row_block. Intra-CTA
// split-K: its WARP_SPLIT_K warps take the tiles along K round-robin.
// Config: Format, KBlock, K_BLOCKS; In (Activations, float, half, bf16), TOKENS (1, 8, 16), M16_TILES (1, 2, 4),
// ROW_BLOCKS, GATED, WARP_SPLIT_K, CLUSTER_SPLIT_K (CTAs of a cluster, which share K as well; 1: no cluster), STAGES,
// STAGE_K_BLOCKS (k_blocks of a stage: one, or all of a tile),
// PREFETCH (k_blocks of W behind the pipeline that go to the L2 cache at first), BULK (whether stages fill by
// cp.async.bulk, sm_90), WARP_BYTES, INBOX_BYTES and REDUCE_BYTES (shared memory of a warp's pipeline, of the sums that
// CTAs of a cluster send each other, and of the reduction). decode_slices: SLICED, SLICES_BYTES, POINTS_BYTES
// (columns of x that a CTA has at once, their bytes, and those of a table of points).
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
    static constexpr int ACC_ROWS = ROW_BLOCK_ROWS * ROW_BLOCKS,
                         ROWS = GATED ? ROW_BLOCK_ROWS : ACC_ROWS;  // ROWS: of y
    static constexpr int COLUMN_TILES = (TOKENS + 7) / 8;           // of eight tokens: the columns of an mma
    // Rows of x from a token to the next: a single token is read as all eight columns of its tile.
    static constexpr int TOKEN_STRIDE = TOKENS > 1;

    using Codes = typename Base::template KBlock<M16_TILES>;   // of a k_block, for the CTA's rows of a row_block
    using Fields = typename Base::template Format<M16_TILES>;  // of a tile, for the same rows
    using RowBlockAcc = Acc[M16_TILES][COLUMN_TILES];
    using WarpAcc = RowBlockAcc[ROW_BLOCKS];

    static constexpr bool WHOLE_TILES = STAGE_K_BLOCKS == K_BLOCKS;  // a stage holds a tile
    static_assert(WHOLE_TILES || STAGE_K_BLOCKS == 1, "a stage holds a k_block or a tile");
    static constexpr int STAGES_OF_TILE = K_BLOCKS / STAGE_K_BLOCKS, STAGE_COLUMNS = STAGE_K_BLOCKS * K_BLOCK;
    static constexpr int STAGE_STEPS = STAGE_COLUMNS / 16;
    static constexpr int STAGE_SCALES =
        TileConfig<Base>::GROUP_SIZE < STAGE_COLUMNS ? STAGE_COLUMNS / TileConfig<Base>::GROUP_SIZE : 1;

    static_assert(ROWS % CLUSTER_SPLIT_K == 0, "each CTA of a cluster stores as many rows");

    // Whether minimums are multiplied by sums of x once a tile, those of all groups of a super-block together.
    static constexpr bool SHARED_MINIMUM = Fields::HAS_MINIMUM && Fields::SUPER_BLOCK;
    static constexpr int MINIMUM_PAIRS =
        SHARED_MINIMUM ? TileConfig<Base>::K_BLOCK_SCALES / 2 : 1;  // pairs of groups in a k_block
    static_assert(!SHARED_MINIMUM || (K_BLOCKS == 4 && (MINIMUM_PAIRS == 1 || MINIMUM_PAIRS == 2)),
                  "a lane of a quad has a k_block's sums");
};

}  // namespace qgemm
