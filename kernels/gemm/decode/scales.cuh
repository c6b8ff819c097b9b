// Scales in decode, which the lanes of a warp decode once a tile for each other, and the minimums of super-blocks,
// which multiply the sums of x over the groups once a tile.
//
// Config: Decode of config.cuh.
#pragma once

#include "operand.cuh"
#include "pipeline.cuh"

namespace qgemm {

// The scales of a stage, each for rows g and g + 8.
template <class Config>
using StageScales = float2[Config::STAGE_SCALES];

// The decoded scales of a warp's current tile in shared memory, for rows g and g + 8 of each group of 16 rows.
template <class Config, bool ONCE>
struct SmemScales {
    static constexpr int M16_TILES = Config::M16_TILES, ROWS = 8 * M16_TILES, SCALES = Config::STAGE_SCALES;
    static constexpr int TOGETHER = SCALES % 2 ? 1 : 2;  // read as 16 bytes
    struct alignas(8 * TOGETHER) Together {
        float2 scales[TOGETHER];
    };
    static constexpr int COUNT = Config::TILE_SCALES / TOGETHER;
    Together scales[Config::ROW_BLOCKS][COUNT][ROWS];

    // All scales are decoded before the first is stored: a store between them would make each load d again.
    __device__ void decode(const typename Config::Fields& fields, int row_block, int lane) {
        constexpr int PER_LANE = (COUNT * ROWS + 31) / 32;
        Together decoded[PER_LANE];
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            const int i = 32 * j + lane, index = i / ROWS % COUNT, row = i % ROWS;
#pragma unroll
            for (int k = 0; k < TOGETHER; ++k)
                decoded[j].scales[k] = fields.scale(row / 8, row % 8, TOGETHER * index + k);
        }
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            const int i = 32 * j + lane;
            if (COUNT * ROWS % 32 == 0 || i < COUNT * ROWS) scales[row_block][i / ROWS][i % ROWS] = decoded[j];
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

// Shared memory of a warp. X: the type of a stage's activations, or void.
template <class Config, class X>
struct WarpSmem : SmemScales<Config, Config::Fields::SCALES_ONCE> {
    SmemPipeline<Config, X> pipeline;
};

// A lane's sums of x over groups of a super-block: for token g and the groups of the tile's k_block t, in pairs.
template <class Config>
struct XSums {
    static constexpr int PAIRS = Config::MINIMUM_PAIRS;
    float2 sums[Config::N8_TILES][PAIRS];

    // Moves the sums of a k_block to the lanes t = k_block. sums_of(n8, group): the calling lane's sums of tokens 2t
    // and 2t + 1 over a group of the k_block, as they lie in accumulators of an mma.
    template <class Sums>
    __device__ void move(int k_block, int lane, Sums sums_of) {
        const int g = lane / 4, t = lane % 4, from = g % 2 * 4 + g / 2;
#pragma unroll
        for (int n8 = 0; n8 < Config::N8_TILES; ++n8)
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) {
                const float2 first = sums_of(n8, 2 * pair), second = sums_of(n8, 2 * pair + 1);
                if constexpr (Config::TOKENS == 1) {  // in every column
                    if (t == k_block) sums[n8][pair] = {first.x, second.x};
                    continue;
                }
                // Lanes of odd g send their odd token, lanes of even g their even one.
                const float2 received = {__shfl_sync(~0u, g % 2 ? first.y : first.x, from),
                                         __shfl_sync(~0u, g % 2 ? second.y : second.x, from)};
                if (t == k_block) sums[n8][pair] = received;
            }
    }
};

// Adds minimum * sum of x for a tile of a super-block. A sum is split into TERMS bf16 of 8 bits, so that only the float
// accumulation rounds. unit: of the sums in accumulators of rows g and of rows g + 8.
template <class Config, int TERMS>
__device__ inline void add_minimums(typename Config::RowBlockAcc& acc, const XSums<Config>& x_sums,
                                    const typename Config::Fields& fields, float2 unit, int lane) {
    constexpr int N8_TILES = Config::N8_TILES, PAIRS = Config::MINIMUM_PAIRS;
    const int g = lane / 4, t = lane % 4;
    u32 terms[N8_TILES][PAIRS][TERMS];
#pragma unroll
    for (int n8 = 0; n8 < N8_TILES; ++n8)
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            float2 rest = x_sums.sums[n8][pair];
#pragma unroll
            for (int i = 0; i < TERMS; ++i) terms[n8][pair][i] = take_bf16(rest);
        }
#pragma unroll
    for (int m16 = 0; m16 < Config::M16_TILES; ++m16) {
        const float2 factor = fields.super_minimum(m16, g);
        u32 minimums[PAIRS][2];
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) fields.sub_minimums(minimums[pair], m16, g, PAIRS * t + pair);
#pragma unroll
        for (int n8 = 0; n8 < N8_TILES; ++n8) {
            Acc dots = {};
#pragma unroll
            for (int i = 0; i < TERMS; ++i) {
                if constexpr (PAIRS == 1) {
                    mma_m16n8k8(dots, minimums[0], terms[n8][0][i]);
                } else {  // groups of 16: the order of columns within an mma is free
                    const u32 sums[2] = {terms[n8][0][i], terms[n8][PAIRS - 1][i]};
                    mma_m16n8k16<bf16>(
                        dots,
                        as_fragment(minimums[0][0], minimums[0][1], minimums[PAIRS - 1][0], minimums[PAIRS - 1][1]),
                        sums);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
                acc[m16][n8].sum[i] += (i < 2 ? factor.x * unit.x : factor.y * unit.y) * dots.sum[i];
        }
    }
}

// Multiplies stage number i of the warp. The first stage of a tile decodes scales before multiply(), the last one adds
// minimums after it. SUM_TERMS, sum_unit: see add_minimums.
template <class Config, int SUM_TERMS, class Smem, class Multiply>
__device__ __forceinline__ void multiply_stage(typename Config::WarpAcc& acc, const XSums<Config>& x_sums, Smem& smem,
                                               int i, int stage, float2 sum_unit, int lane, Multiply multiply) {
    constexpr int ROW_BLOCKS = Config::ROW_BLOCKS, STAGES_OF_TILE = Config::STAGES_OF_TILE;
    const auto fields = [&](int row_block) -> const auto& { return smem.pipeline.fields(i, stage, row_block); };
    if (i % STAGES_OF_TILE == 0)
        for (int row_block = 0; row_block < ROW_BLOCKS; ++row_block) smem.decode(fields(row_block), row_block, lane);
    multiply();
    if constexpr (Config::SHARED_MINIMUM)
        if (i % STAGES_OF_TILE == STAGES_OF_TILE - 1)
            for (int row_block = 0; row_block < ROW_BLOCKS; ++row_block)
                add_minimums<Config, SUM_TERMS>(acc[row_block], x_sums, fields(row_block), sum_unit, lane);
}

}  // namespace qgemm
