// Scales of the decode kernels: decoded once a tile for the whole warp, and the minimums of super-blocks, which meet the
// sums of x over its groups once a tile.
//
// Config: Decode of config.cuh.
#pragma once

#include "operand.cuh"
#include "pipeline.cuh"

namespace qgemm {

// The decoded scales of a warp's current tile in shared memory, rows g and g + 8 of each 16-row group.
template <class Config, bool ONCE>
struct SmemScales {
    static constexpr int M16_TILES = Config::M16_TILES, TILE_SCALES = Config::TILE_SCALES;
    float2 of[Config::ROW_BLOCKS][TILE_SCALES][8 * M16_TILES];

    __device__ void decode(const typename Config::Fields& fields, int row_block, int lane) {
#pragma unroll
        for (int i = lane; i < TILE_SCALES * 8 * M16_TILES; i += 32) {
            const int index = i / (8 * M16_TILES), row = i % (8 * M16_TILES);
            of[row_block][index][row] = fields.scale(row / 8, row % 8, index);
        }
        __syncwarp();
    }
    __device__ float2 scale(const typename Config::Fields&, int row_block, int m16, int g, int index) const {
        return of[row_block][index][8 * m16 + g];
    }
};
template <class Config>
struct SmemScales<Config, false> {
    __device__ void decode(const typename Config::Fields&, int, int) {}
    __device__ float2 scale(const typename Config::Fields& fields, int, int m16, int g, int index) const {
        return fields.scale(m16, g, index);
    }
};

// Shared memory of a warp. X: activations of a stage, or void.
template <class Config, class X>
struct WarpSmem : SmemScales<Config, Config::Fields::SCALES_ONCE> {
    SmemPipeline<Config, X> pipeline;
};

// Sums of x over the groups of 32 of a super-block: token g, groups 2t and 2t + 1.
template <class Config>
struct XSums {
    float2 of[Config::COLUMN_TILES];
};

// Adds minimum * sum of x for a tile of a super-block. Each sum is split into TERMS bf16 of 8 bits, so that only the
// float accumulation rounds. high_row_factor: what the accumulators of rows g + 8 carry beyond those of rows g.
template <class Config, int TERMS>
__device__ inline void add_minimums(typename Config::RowBlockAcc& acc, const XSums<Config>& x_sums,
                                    const typename Config::Fields& fields, int high_row_factor, int lane) {
    constexpr int COLUMN_TILES = Config::COLUMN_TILES;
    const int g = lane / 4, t = lane % 4;
    u32 terms[COLUMN_TILES][TERMS];
#pragma unroll
    for (int tokens = 0; tokens < COLUMN_TILES; ++tokens) {
        float2 rest = x_sums.of[tokens];
#pragma unroll
        for (int i = 0; i < TERMS; ++i) terms[tokens][i] = take_bf16(rest);
    }
#pragma unroll
    for (int m16 = 0; m16 < Config::M16_TILES; ++m16) {
        const float2 factor = fields.super_minimum(m16, g);
        u32 minimums[2];
        fields.sub_minimums(minimums, m16, g, t);
#pragma unroll
        for (int tokens = 0; tokens < COLUMN_TILES; ++tokens) {
            Acc dots = {};
#pragma unroll
            for (int i = 0; i < TERMS; ++i) mma_m16n8k8(dots, minimums, terms[tokens][i]);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                acc[m16][tokens].sum[i] += (i < 2 ? factor.x : factor.y * high_row_factor) * dots.sum[i];
        }
    }
}

}  // namespace qgemm
