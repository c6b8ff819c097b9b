// Reduction and epilogue of the decode kernels: split-K over the warps of the CTA, in their order, then y.
//
// Config: Decode of config.cuh.
#pragma once

#include "../epilogue.cuh"
#include "coord.cuh"

namespace qgemm {

// partials: shared memory, [WARP_SPLIT_K][TOKENS][ACC_ROWS + 4] floats; padded, since rows of g and columns of t would share
// banks. factor: of the accumulators of rows g, and of rows g + 8. store(token, row, sums) gets a row of W and its sum,
// sums(0); GATED: the sum of the other product is sums(1).
template <class Config, class Store>
__device__ inline void reduce_and_store(const typename Config::WarpAcc& acc, float2 factor, float* partials,
                                        const WarpCoord<Config>& coord, int m, Store store) {
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
    const i64 n = coord.products.of[coord.index].n;
    for (int i = threadIdx.x; i < m * ROWS; i += Config::THREADS) {
        const int row = i % ROWS, token = i / ROWS;
        if (coord.first_row + row >= n) continue;
        store(token, coord.first_row + row, [&](int product) {
            float sum = 0;
#pragma unroll
            for (int warp_k = 0; warp_k < Config::WARP_SPLIT_K; ++warp_k)
                sum += partials[(warp_k * TOKENS + token) * STRIDE + row + product * Config::ROW_BLOCK_ROWS];
            return sum;
        });
    }
}

// y [m, n] of the CTA's product, or of both where one is the gate of the other.
template <class Config>
struct StoreProducts {
    const WarpCoord<Config>& coord;

    template <class Sums>
    __device__ void operator()(int token, i64 row, Sums sums) const {
        const Epilogue epilogue = epilogue_of(coord.index);
        const i64 first = token * coord.products.of[coord.index].n;
        if constexpr (Config::GATED) {
            const float up = epilogue_of(1).biased(row, sums(1));
            const float made = gated(epilogue.types.gate, epilogue.biased(row, sums(0)), up);
            store_as(epilogue.arrays.y, epilogue.types.y, first + row, made);
        } else {
            epilogue.store(first, row, sums(0));
        }
    }
    __device__ Epilogue epilogue_of(int index) const {
        return {{coord.products.arrays[index].outputs, coord.products.of[index].types}};
    }
};

}  // namespace qgemm
