// The parts that levels 2 to 5 share: the tile of q4_0, the operands of mma.sync, the store.
#pragma once

#include "fragment.cuh"
#include "ptx/mma.cuh"

namespace qgemm {

constexpr int TILE_COLUMNS = 64, STEP_COLUMNS = 16, BLOCK_STEPS = 2;  // a block of 32 weights is two steps

// 64 rows x 64 columns of W. A row group is 16 rows; lane 4 g + t owns rows g and g + 8 of it, one word a step.
struct LadderTile {
    u32 codes[4][32][4];  // [row group][lane][step]
    half d[4][8][2][2];   // [row group][g][block][row g, row g + 8]
};

// Operand B of a step, columns `column` to column + 15 of x [m, k]: lane 4 g + t owns token g. Zeros beyond m.
__device__ inline void load_x(u32 (&b)[2], const half* x, int k, int m, int column) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const half* from = x + i64(g) * k + column + 2 * t;
    b[0] = g < m ? *reinterpret_cast<const u32*>(from) : 0;
    b[1] = g < m ? *reinterpret_cast<const u32*>(from + 8) : 0;
}

// sums += d * dots, d of rows g and g + 8.
__device__ inline void add_scaled(Acc& sums, const Acc& dots, float d_low, float d_high) {
    sums.sum[0] += d_low * dots.sum[0], sums.sum[1] += d_low * dots.sum[1];
    sums.sum[2] += d_high * dots.sum[2], sums.sum[3] += d_high * dots.sum[3];
}

// The 16 x 8 sums of a warp to y [m, n]: rows `row` to row + 15 of W are columns of y.
__device__ inline void store_y(float* y, const Acc& sums, int row, int n, int m) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; ++i) {
        const int token = 2 * t + i % 2;
        if (token < m) y[i64(token) * n + row + g + i / 2 * 8] = sums.sum[i];
    }
}

}  // namespace qgemm
