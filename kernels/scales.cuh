// SmemScales of a tile that the lanes of a warp decode once for each other, and the minimums of a super-block, which
// meet the sums of x over its groups once a tile.
#pragma once

#include "operand.cuh"
#include "warp_split_k.cuh"

constexpr int TILE_SCALES = TILE_COLUMNS / Format::GROUP_SIZE;               // of a row
constexpr bool SHARED_MINIMUM = Format::HAS_MINIMUM && Format::SUPER_BLOCK;  // of a super-block's minimums

// The decoded scales of the tile in hand, rows g and g + 8.
template <bool ONCE>
struct SmemScales {
    float2 of[ROW_BLOCKS][TILE_SCALES][8 * M16_TILES];

    __device__ void take(const Fields& fields, int row_block, int lane) {
#pragma unroll
        for (int i = lane; i < TILE_SCALES * 8 * M16_TILES; i += 32) {
            const int index = i / (8 * M16_TILES), row = i % (8 * M16_TILES);
            of[row_block][index][row] = fields.scale(row / 8, row % 8, index);
        }
        __syncwarp();
    }
    __device__ float2 operator()(const Fields&, int row_block, int m16, int g, int index) const {
        return of[row_block][index][8 * m16 + g];
    }
};
template <>
struct SmemScales<false> {
    __device__ void take(const Fields&, int, int) {}
    __device__ float2 operator()(const Fields& fields, int, int m16, int g, int index) const {
        return fields.scale(m16, g, index);
    }
};

// The memory of a warp: its pipeline, whose stages hold an X, and the scales of the tile in hand.
template <class X>
struct Smem : SmemScales<Format::SCALES_ONCE> {
    SmemPipeline<X, K_BLOCKS> pipeline;
};

// The sums of x over each group of 32 of a super-block: of token g, groups 2t and 2t + 1.
struct XSums {
    float2 of[COLUMN_TILES];
};

// Adds the minimums' products of a super-block: with each sum of x in TERMS of 8 bits, exact but for float sums.
// `unit`: what the minimums of rows g + 8 are multiplied with, those of rows g being as they are.
template <int TERMS>
__device__ inline void add_minimums(Acc (&acc)[M16_TILES][COLUMN_TILES], const XSums& x_sums, const Fields& fields,
                                    int unit, int lane) {
    const int g = lane / 4, t = lane % 4;
    u32 terms[COLUMN_TILES][TERMS];
#pragma unroll
    for (int tokens = 0; tokens < COLUMN_TILES; ++tokens) {
        float2 rest = x_sums.of[tokens];
#pragma unroll
        for (int i = 0; i < TERMS; ++i) terms[tokens][i] = take_bf16(rest);
    }
#pragma unroll
    for (int m16 = 0; m16 < M16_TILES; ++m16) {
        const float2 factor = fields.super_minimum(m16, g);
        u32 minimums[2];
        fields.sub_minimums(minimums, m16, g, t);
#pragma unroll
        for (int tokens = 0; tokens < COLUMN_TILES; ++tokens) {
            Acc dots = {};
#pragma unroll
            for (int i = 0; i < TERMS; ++i) mma_m16n8k8(dots, minimums, terms[tokens][i]);
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[m16][tokens].sum[i] += (i < 2 ? factor.x : factor.y * unit) * dots.sum[i];
        }
    }
}
