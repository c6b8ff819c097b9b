// Scales of the decode kernels, decoded once a tile for the whole warp; and the minimums of super-blocks, which are
// multiplied once a tile by the sums of x over the groups.
//
// Config: Decode of config.cuh.
#pragma once

#include "operand.cuh"
#include "pipeline.cuh"

namespace qgemm {

// The scales of a stage, of rows g and g + 8 each.
template <class Config>
using StageScales = float2[Config::STAGE_SCALES];

// The decoded scales of a warp's current tile in shared memory, rows g and g + 8 of each 16-row group.
template <class Config, bool ONCE>
struct SmemScales {
    static constexpr int M16_TILES = Config::M16_TILES, ROWS = 8 * M16_TILES, SCALES = Config::STAGE_SCALES;
    static constexpr int TOGETHER = SCALES % 2 ? 1 : 2;  // read as 16 bytes
    struct alignas(8 * TOGETHER) Together {
        float2 of[TOGETHER];
    };
    static constexpr int COUNT = Config::TILE_SCALES / TOGETHER;
    Together scales[Config::ROW_BLOCKS][COUNT][ROWS];

    // All are decoded before the first is stored: a store between loads would make each load d anew.
    __device__ void decode(const typename Config::Fields& fields, int row_block, int lane) {
        constexpr int EACH = (COUNT * ROWS + 31) / 32;
        Together found[EACH];
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const int i = 32 * j + lane, index = i / ROWS % COUNT, row = i % ROWS;
#pragma unroll
            for (int k = 0; k < TOGETHER; ++k) found[j].of[k] = fields.scale(row / 8, row % 8, TOGETHER * index + k);
        }
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const int i = 32 * j + lane;
            if (COUNT * ROWS % 32 == 0 || i < COUNT * ROWS) scales[row_block][i / ROWS][i % ROWS] = found[j];
        }
        __syncwarp();
    }
    __device__ void load(StageScales<Config>& to, const typename Config::Fields&, int row_block, int m16, int g,
                         int k_block) const {
        const int first = Config::scale_index(k_block, 0) / TOGETHER;
#pragma unroll
        for (int i = 0; i < SCALES / TOGETHER; ++i)
            reinterpret_cast<Together*>(to)[i] = scales[row_block][first + i][8 * m16 + g];
    }
};
template <class Config>
struct SmemScales<Config, false> {
    __device__ void decode(const typename Config::Fields&, int, int) {}
    __device__ void load(StageScales<Config>& to, const typename Config::Fields& fields, int, int m16, int g,
                         int k_block) const {
#pragma unroll
        for (int i = 0; i < Config::STAGE_SCALES; ++i)
            to[i] =
                fields.scale(m16, g, Config::scale_index(k_block, i * (Config::STAGE_STEPS / Config::STAGE_SCALES)));
    }
};

// Shared memory of a warp. X: activations of a stage, or void.
template <class Config, class X>
struct WarpSmem : SmemScales<Config, Config::Fields::SCALES_ONCE> {
    SmemPipeline<Config, X> pipeline;
};

// A lane's sums of x over groups of a super-block: of token g, and the groups of k_block t of the tile in pairs.
template <class Config>
struct XSums {
    static constexpr int PAIRS = Config::MINIMUM_PAIRS;
    float2 of[Config::COLUMN_TILES][PAIRS];

    // Takes the sums of a k_block to the lanes t = k_block. sums(tokens, group): the calling lane's sums of tokens 2t
    // and 2t + 1 over a group of the k_block, as accumulators of an mma have them.
    template <class Sums>
    __device__ void take(int k_block, int lane, Sums sums) {
        const int g = lane / 4, t = lane % 4, from = g % 2 * 4 + g / 2;
#pragma unroll
        for (int tokens = 0; tokens < Config::COLUMN_TILES; ++tokens)
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) {
                const float2 first = sums(tokens, 2 * pair), second = sums(tokens, 2 * pair + 1);
                if constexpr (Config::TOKENS == 1) {  // in every column
                    if (t == k_block) of[tokens][pair] = {first.x, second.x};
                    continue;
                }
                // Lanes of odd g offer the odd one of their two tokens.
                const float2 got = {__shfl_sync(~0u, g % 2 ? first.y : first.x, from),
                                    __shfl_sync(~0u, g % 2 ? second.y : second.x, from)};
                if (t == k_block) of[tokens][pair] = got;
            }
    }
};

// Adds minimum * sum of x for a tile of a super-block. Each sum is split into TERMS bf16 of 8 bits, so that only the
// float accumulation rounds. high_row_factor: what the accumulators of rows g + 8 carry beyond those of rows g.
template <class Config, int TERMS>
__device__ inline void add_minimums(typename Config::RowBlockAcc& acc, const XSums<Config>& x_sums,
                                    const typename Config::Fields& fields, int high_row_factor, int lane) {
    constexpr int COLUMN_TILES = Config::COLUMN_TILES, PAIRS = Config::MINIMUM_PAIRS;
    const int g = lane / 4, t = lane % 4;
    u32 terms[COLUMN_TILES][PAIRS][TERMS];
#pragma unroll
    for (int tokens = 0; tokens < COLUMN_TILES; ++tokens)
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            float2 rest = x_sums.of[tokens][pair];
#pragma unroll
            for (int i = 0; i < TERMS; ++i) terms[tokens][pair][i] = take_bf16(rest);
        }
#pragma unroll
    for (int m16 = 0; m16 < Config::M16_TILES; ++m16) {
        const float2 factor = fields.super_minimum(m16, g);
        u32 minimums[PAIRS][2];
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) fields.sub_minimums(minimums[pair], m16, g, PAIRS * t + pair);
#pragma unroll
        for (int tokens = 0; tokens < COLUMN_TILES; ++tokens) {
            Acc dots = {};
#pragma unroll
            for (int i = 0; i < TERMS; ++i) {
                if constexpr (PAIRS == 1) {
                    mma_m16n8k8(dots, minimums[0], terms[tokens][0][i]);
                } else {  // groups of 16: an mma sums them in any order
                    const u32 sums[2] = {terms[tokens][0][i], terms[tokens][PAIRS - 1][i]};
                    mma_m16n8k16<bf16>(
                        dots,
                        as_fragment(minimums[0][0], minimums[0][1], minimums[PAIRS - 1][0], minimums[PAIRS - 1][1]),
                        sums);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
                acc[m16][tokens].sum[i] += (i < 2 ? factor.x : factor.y * high_row_factor) * dots.sum[i];
        }
    }
}

// Stage number i of this warp. Scales are decoded before multiply() in the first stage of a tile, minimums added after
// it in the last.
// SUM_TERMS, high_row_factor: of add_minimums.
template <class Config, int SUM_TERMS, class Smem, class Multiply>
__device__ __forceinline__ void multiply_stage(typename Config::WarpAcc& acc, const XSums<Config>& x_sums, Smem& smem,
                                               int i, int stage, int high_row_factor, int lane, Multiply multiply) {
    constexpr int ROW_BLOCKS = Config::ROW_BLOCKS, STAGES_OF_TILE = Config::STAGES_OF_TILE;
    const auto fields = [&](int row_block) -> const auto& { return smem.pipeline.fields(i, stage, row_block); };
    if (i % STAGES_OF_TILE == 0)
        for (int row_block = 0; row_block < ROW_BLOCKS; ++row_block) smem.decode(fields(row_block), row_block, lane);
    multiply();
    if constexpr (Config::SHARED_MINIMUM)
        if (i % STAGES_OF_TILE == STAGES_OF_TILE - 1)
            for (int row_block = 0; row_block < ROW_BLOCKS; ++row_block)
                add_minimums<Config, SUM_TERMS>(acc[row_block], x_sums, fields(row_block), high_row_factor, lane);
}

}  // namespace qgemm
