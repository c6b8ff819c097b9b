// Epilogue of prefill_sm90: accumulators -> y, one epilogue tile of EPI_TOKENS tokens after the other. Shared memory
// brings the rows of a token together.
//
// Config: Sm90 of config.cuh. epi_tiles: a mask of epilogue tiles.
#pragma once

#include "gemm/epilogue.cuh"
#include "ptx/stmatrix.cuh"
#include "gemm/row_exponent.cuh"
#include "quantize/scaled_rows.cuh"
#include "warpgroup.cuh"

namespace qgemm {

// Coordinates in y of a warpgroup's outputs. rows, tokens: inside the matrix; skip: leading tokens that another tile
// stores.
template <int BLOCK_TOKENS>
struct EpilogueCoord {
    i64 first_row;
    int first_token, skip, rows, tokens;

    template <class Problem>
    __device__ EpilogueCoord(const Problem& p, int tile, int row_block)
        : first_row(p.row_block(tile, row_block) * TILE_ROWS),
          first_token(p.first_loaded(tile)),
          skip(p.first_token(tile) - first_token),
          rows(int(min(i64(TILE_ROWS), p.n - first_row))),
          tokens(min(BLOCK_TOKENS, p.end_token(tile) - first_token)) {}
};

// The RowFactor of accumulators that are not scaled.
struct NoRowFactor {
    __device__ static constexpr float acc(int) { return 1; }
};

// acc *= the factor of each token's row of x, if x is ScaledRows. Tokens beyond the tile have that of its last one.
// Shared memory of the epilogue brings the factors to the lanes.
template <class Config>
__device__ __forceinline__ void apply_x_factors(const Warpgroup<Config>& wg, typename Config::Acc& acc, int tile,
                                                const ScaledRows& x) {
    if (x.rows) {
        static_assert(Config::BLOCK_TOKENS * sizeof(float) <= sizeof(EpilogueSmem<Config>), "the factors of a tile");
        float* factors = &wg.smem.epi_smem(wg.row_block, wg.wg_k)[0][0];
        const int first = wg.p.first_loaded(tile), last = wg.p.end_token(tile) - 1;
        wg.warpgroup_barrier();  // the previous epilogue tile is read
#pragma unroll
        for (int i = 0; i < Config::BLOCK_TOKENS; i += WARPGROUP_THREADS)
            if (const int token = i + wg.thread; token < Config::BLOCK_TOKENS)
                factors[token] = x.factor(min(first + token, last));
        wg.warpgroup_barrier();
#pragma unroll
        for (int i = 0; i < Config::ACC_SIZE; i += 4) {  // tokens 2t and 2t + 1 of row g, then of row g + 8
            const float2 pair = *reinterpret_cast<const float2*>(&factors[2 * i + wg.thread % 4 * 2]);
            acc[i] *= pair.x, acc[i + 1] *= pair.y, acc[i + 2] *= pair.x, acc[i + 3] *= pair.y;
        }
        wg.warpgroup_barrier();  // the factors are read
    }
}

// RowFactor: acc(r) is the factor of row g (r 0) and of row g + 8 (r 1).
template <class Config, class RowFactor = RowExponent<Config>>
struct EpilogueStore {
    static constexpr int BLOCK_TOKENS = Config::BLOCK_TOKENS, EPI_TOKENS = Config::EPI_TOKENS;
    using Acc = typename Config::Acc;
    using Coord = EpilogueCoord<BLOCK_TOKENS>;
    const Warpgroup<Config>& wg;
    const RowFactor& row_factor;
    u32 epi_tiles;

    __device__ __forceinline__ void store(const Acc& acc, int tile, const Epilogue& epilogue) const {
        const Coord coord(wg.p, tile, wg.row_block);
        void* y = epilogue.arrays.y;
        if (coord.rows == TILE_ROWS && !epilogue.adds()) {
            const int type = epilogue.types.y;
            if (type == FLOAT32 && aligned<float>(y)) return store_whole(acc, coord, static_cast<float*>(y));
            if (type == FLOAT16 && aligned<half>(y)) return store_whole(acc, coord, static_cast<half*>(y));
            if (type == BFLOAT16 && aligned<bf16>(y)) return store_whole(acc, coord, static_cast<bf16*>(y));
        }
        const int warp = wg.thread / 32, lane = wg.thread % 32, g = lane / 4, t = lane % 4;
        auto& epi_smem = wg.smem.epi_smem(wg.row_block, wg.wg_k);
        const bool in_fours = epilogue.in_fours(wg.p.n);
        // The loop is not unrolled, so that the code after the copy exists once: it would exceed the instruction cache.
#pragma unroll 1
        for (int epi_tile = 0; epi_tile < BLOCK_TOKENS; epi_tile += EPI_TOKENS) {
            if (!wg.owns(epi_tile / EPI_TOKENS, epi_tiles)) continue;
            wg.warpgroup_barrier();  // the previous epilogue tile is read
#pragma unroll
            for (int first = 0; first < BLOCK_TOKENS; first += EPI_TOKENS) {
                if (first != epi_tile) continue;
                // Tokens 2t and 2t + 1 of row g, then of row g + 8, then the next 8 tokens.
#pragma unroll
                for (int i = 0; i < EPI_TOKENS / 2; ++i)
                    epi_smem[i / 4 * 8 + 2 * t + i % 2][16 * warp + g + i / 2 % 2 * 8] =
                        acc[first / 2 + i] * row_factor.acc(i / 2 % 2);
            }
            wg.warpgroup_barrier();
            if (in_fours)
                store_fours(epi_smem, coord, epi_tile, epilogue);
            else
                store_clipped(epi_smem, coord, epi_tile, epilogue);
        }
    }

private:
    // Whether all rows of y start at multiples of 16 bytes.
    template <class T>
    __device__ bool aligned(const void* y) const {
        return (reinterpret_cast<i64>(y) | wg.p.n * i64(sizeof(T))) % 16 == 0;
    }
    // Fast path: all 64 rows are inside the matrix, and there is neither bias nor residual.
    template <class T>
    __device__ __forceinline__ void store_whole(const Acc& acc, const Coord& coord, T* y) const {
        constexpr int PER_STORE = 16 / sizeof(T), STORES = TILE_ROWS / PER_STORE;
        const int warp = wg.thread / 32, lane = wg.thread % 32, g = lane / 4, t = lane % 4;
        auto& epi_smem =
            *reinterpret_cast<T(*)[EPI_TOKENS][TILE_ROWS + PER_STORE]>(wg.smem.epi_smem(wg.row_block, wg.wg_k));
        y += coord.first_token * wg.p.n + coord.first_row;
#pragma unroll
        for (int epi_tile = 0; epi_tile < BLOCK_TOKENS; epi_tile += EPI_TOKENS) {
            if (!wg.owns(epi_tile / EPI_TOKENS, epi_tiles)) continue;
            wg.warpgroup_barrier();  // the previous epilogue tile is read
#pragma unroll
            for (int i = 0; i < EPI_TOKENS / 8; i += 2) {
                // Pairs of tokens 2t and 2t + 1: of rows g and g + 8, then of the same rows in the next 8 tokens. If
                // there are none, the first 8 tokens are written twice.
                T values[8];
                const int next = i + 1 < EPI_TOKENS / 8;
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    values[j] =
                        from_float<T>(acc[(epi_tile / 8 + i + j / 4 * next) * 4 + j % 4] * row_factor.acc(j / 2 % 2));
                if constexpr (sizeof(T) == 2) {
                    u32 pairs[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) pairs[j] = *reinterpret_cast<const u32*>(&values[2 * j]);
                    const int token = 8 * i + lane / 16 * 8 * next + lane % 8, row = 16 * warp + lane / 8 % 2 * 8;
                    stmatrix_x4_trans(shared_address(&epi_smem[token][row]), pairs);
                } else {
#pragma unroll
                    for (int j = 0; j < 8; ++j)
                        epi_smem[8 * (i + j / 4 * next) + 2 * t + j % 2][16 * warp + g + j / 2 % 2 * 8] = values[j];
                }
            }
            wg.warpgroup_barrier();
#pragma unroll
            for (int i = 0; i < EPI_TOKENS * STORES; i += WARPGROUP_THREADS) {
                const int token = (i + wg.thread) / STORES, row = (i + wg.thread) % STORES * PER_STORE;
                if (epi_tile + token >= coord.skip && epi_tile + token < coord.tokens)
                    *reinterpret_cast<uint4*>(&y[(epi_tile + token) * wg.p.n + row]) =
                        *reinterpret_cast<const uint4*>(&epi_smem[token][row]);
            }
        }
    }
    // The part of an epilogue tile that is inside the matrix, with bias and residual, four rows at a time.
    __device__ __forceinline__ void store_fours(const EpilogueSmem<Config>& epi_smem, const Coord& coord, int epi_tile,
                                                const Epilogue& epilogue) const {
        constexpr int FOURS = TILE_ROWS / 4, STEP = WARPGROUP_THREADS / FOURS;
        const int begin = max(coord.skip - epi_tile, 0), end = min(coord.tokens - epi_tile, EPI_TOKENS);
        const int row = wg.thread % FOURS * 4;
        if (row >= coord.rows) return;
#pragma unroll 1
        for (int token = begin + wg.thread / FOURS; token < end; token += STEP)
            epilogue.store_four((coord.first_token + epi_tile + token) * wg.p.n, coord.first_row + row,
                                *reinterpret_cast<const float4*>(&epi_smem[token][row]));
    }
    // Slow path: the same one by one, where rows of y or arrays do not start at multiples of four values.
    __device__ __forceinline__ void store_clipped(const EpilogueSmem<Config>& epi_smem, const Coord& coord,
                                                  int epi_tile, const Epilogue& epilogue) const {
        const int begin = max(coord.skip - epi_tile, 0), end = min(coord.tokens - epi_tile, EPI_TOKENS);
#pragma unroll 1
        for (int i = begin * TILE_ROWS + wg.thread; i < end * TILE_ROWS; i += WARPGROUP_THREADS) {
            const int token = i / TILE_ROWS, row = i % TILE_ROWS;
            if (row < coord.rows)
                epilogue.store((coord.first_token + epi_tile + token) * wg.p.n, coord.first_row + row,
                               epi_smem[token][row]);
        }
    }
};

}  // namespace qgemm
