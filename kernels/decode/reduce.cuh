// Reduction and epilogue of the decode kernels: split-K over the warps of the CTA, in their order, then y.
//
// Config: Decode of config.cuh.
#pragma once

#include "../epilogue.cuh"
#include "coord.cuh"

namespace qgemm {

// partials: shared memory, [WARP_SPLIT_K][TOKENS][ACC_ROWS + 4] floats; padded, since rows of g and columns of t would share
// banks. factor: of the accumulators of rows g, and of rows g + 8.
template <class Config>
__device__ inline void reduce_and_store(const typename Config::WarpAcc& acc, float2 factor, float* partials,
                                        const WarpCoord<Config>& coord, int m) {
    constexpr int M16_TILES = Config::M16_TILES, TOKENS = Config::TOKENS, ROWS = Config::ROWS;
    constexpr int STRIDE = Config::ACC_ROWS + 4;
    static_assert(sizeof(float) * Config::WARP_SPLIT_K * TOKENS * STRIDE == Config::REDUCE_BYTES,
                  "shared memory of the reduction differs from the host's");
    const int g = coord.lane / 4, t = coord.lane % 4;
#pragma unroll
    for (int m16 = 0; m16 < Config::ROW_BLOCKS * M16_TILES; ++m16)
#pragma unroll
        for (int tokens = 0; tokens < Config::COLUMN_TILES; ++tokens)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = 16 * m16 + g + 8 * (i / 2), token = 8 * tokens + 2 * t + i % 2;
                const float sum = (i < 2 ? factor.x : factor.y) * acc[m16 / M16_TILES][m16 % M16_TILES][tokens].sum[i];
                if (i % 2 < TOKENS && token < m) partials[(coord.warp_k * TOKENS + token) * STRIDE + row] = sum;
            }
    __syncthreads();
    const auto epilogue_of = [&](int index) {
        return Epilogue{{coord.products.arrays[index].outputs, coord.products.of[index].types}};
    };
    const auto sum_of = [&](int token, int row) {
        float sum = 0;
#pragma unroll
        for (int warp_k = 0; warp_k < Config::WARP_SPLIT_K; ++warp_k)
            sum += partials[(warp_k * TOKENS + token) * STRIDE + row];
        return sum;
    };
    const i64 n = coord.products.of[coord.index].n;
    const Epilogue epilogue = epilogue_of(coord.index);
    for (int i = threadIdx.x; i < m * ROWS; i += Config::THREADS) {
        const int row = i % ROWS, token = i / ROWS;
        const i64 row_of_w = coord.first_row + row;
        if (row_of_w >= n) continue;
        const float sum = sum_of(token, row);
        if constexpr (Config::GATED) {
            const float factor = gate(epilogue.types.gate, epilogue.biased(row_of_w, sum));
            const float up = epilogue_of(1).biased(row_of_w, sum_of(token, row + Config::ROW_BLOCK_ROWS));
            store_as(epilogue.arrays.y, epilogue.types.y, token * n + row_of_w, factor * up);
        } else {
            epilogue.store(token * n, row_of_w, sum);
        }
    }
}

}  // namespace qgemm
