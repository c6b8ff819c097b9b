// A CTA that owns GROUPS groups of 16 rows of a strip: its SPLITS warps take the strip's tiles in turn, each through a
// ring of its own, and their sums meet at the end, in a fixed order.
#pragma once

#include "mma.cuh"

constexpr int THREADS = SPLITS * 32;
constexpr int ROWS = 16 * GROUPS;
constexpr int COLUMN_TILES = TOKENS / 8;

using Slice = FormatOf<GROUPS>;
using AllSums = Sums[GROUPS][COLUMN_TILES];

// The warps' sums times a unit, that of rows g and of rows g + 8, -> y. `parts` is shared memory of the whole CTA.
__device__ inline void reduce_and_store(const AllSums& sums, float2 unit, float* parts, Out* y, i64 first_row, i64 n,
                                        int m, int split, int lane) {
    constexpr int STRIDE = ROWS + 4;  // rows of g and columns of t fall on different banks
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group)
#pragma unroll
        for (int tokens = 0; tokens < COLUMN_TILES; ++tokens)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = 16 * group + g + 8 * (i / 2), token = 8 * tokens + 2 * t + i % 2;
                const float sum = (i < 2 ? unit.x : unit.y) * sums[group][tokens].sum[i];
                if (token < m) parts[(split * TOKENS + token) * STRIDE + row] = sum;
            }
    __syncthreads();
    for (int i = threadIdx.x; i < m * ROWS; i += THREADS) {
        const int row = i % ROWS, token = i / ROWS;
        float sum = 0;
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) sum += parts[(s * TOKENS + token) * STRIDE + row];
        if (first_row + row < n) y[token * n + first_row + row] = from_float<Out>(sum);
    }
}
