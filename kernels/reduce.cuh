// Sums across the lanes and the split groups of a CTA that owns 64 rows of W, in a fixed order.
#pragma once

#include "types.cuh"

constexpr int SPLITS = 4;  // groups of four warps that share the tiles of a strip
constexpr int THREADS = SPLITS * 128;

// sums[row][token] of each lane (rows g and g + 8 of its warp) -> y [m, n]. Lanes t = 0..3 hold parts of the same rows.
template <int TOKENS>
__device__ void reduce_and_store(float (&sums)[2][TOKENS], Out* __restrict__ y, i64 first_row, i64 n, int m) {
    __shared__ float parts[SPLITS][64][TOKENS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, split = threadIdx.x / 128;
#pragma unroll
    for (int row = 0; row < 2; ++row)
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            float sum = sums[row][token];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (lane % 4 == 0) parts[split][16 * warp + 8 * row + lane / 4][token] = sum;
        }
    __syncthreads();
    for (int i = threadIdx.x; i < 64 * TOKENS; i += THREADS) {
        const int row = i % 64, token = i / 64;
        if (first_row + row >= n || token >= m) continue;
        float sum = 0;
        for (int group = 0; group < SPLITS; ++group) sum += parts[group][row][token];
        y[token * n + first_row + row] = from_float<Out>(sum);
    }
}
