// Epilogue of prefill_sm90: accumulators -> y, an epilogue tile of EPI_TILE tokens at a time through shared memory,
// where the rows of a token lie side by side.
//
// Config: Sm90 of config.cuh. epi_tiles: a mask of epilogue tiles.
#pragma once

#include "gemm/epilogue.cuh"
#include "ptx/stmatrix.cuh"
#include "gemm/row_exponent.cuh"
#include "warpgroup.cuh"

namespace qgemm {

// Where the outputs of a warpgroup lie in y.
struct EpilogueCoord {
    i64 first_row;
    int first_token, skip, rows,
        tokens;  // rows, tokens: those inside the matrix; skip: tokens that another tile stores

    template <class Config>
    __device__ EpilogueCoord(const Problem<Config>& p, int tile, int row_block)
        : first_row(p.row_block(tile, row_block) * TILE_ROWS),
          first_token(p.first_loaded(tile)),
          skip(p.first_token(tile) - first_token),
          rows(int(min(i64(TILE_ROWS), p.n - first_row))),
          tokens(min(Config::TOKENS, p.end_token(tile) - first_token)) {}
};

// The factor of accumulators that need none.
struct NoRowFactor {
    __device__ static constexpr float acc(int) { return 1; }
};

// RowFactor: acc(r), the factors of rows g and g + 8.
template <class Config, class RowFactor = RowExponent<Config>>
struct EpilogueStore {
    static constexpr int TOKENS = Config::TOKENS, EPI_TILE = Config::EPI_TILE;
    using Acc = typename Config::Acc;
    const Warpgroup<Config>& wg;
    const RowFactor& row_factor;
    u32 epi_tiles;

    __device__ __forceinline__ void store(const Acc& acc, int tile, const Epilogue& epilogue) const {
        const EpilogueCoord at(wg.p, tile, wg.row_block);
        void* y = epilogue.arrays.y;
        if (at.rows == TILE_ROWS && !epilogue.adds()) {
            const int type = epilogue.types.y;
            if (type == FLOAT32 && aligned<float>(y)) return store_whole(acc, at, static_cast<float*>(y));
            if (type == FLOAT16 && aligned<half>(y)) return store_whole(acc, at, static_cast<half*>(y));
            if (type == BFLOAT16 && aligned<bf16>(y)) return store_whole(acc, at, static_cast<bf16*>(y));
        }
        const int warp = wg.thread / 32, lane = wg.thread % 32, g = lane / 4, t = lane % 4;
        auto& epi_smem = wg.smem.epi_smem(wg.row_block, wg.wg_k);
#pragma unroll
        for (int epi_tile = 0; epi_tile < TOKENS; epi_tile += EPI_TILE) {
            if (!wg.owns(epi_tile / EPI_TILE, epi_tiles)) continue;
            wg.warpgroup_barrier();  // the epilogue tile before is read
#pragma unroll
            for (int i = 0; i < EPI_TILE / 2;
                 ++i)  // tokens 2t, 2t + 1 of row g, then of row g + 8, then the next 8 tokens
                epi_smem[i / 4 * 8 + 2 * t + i % 2][16 * warp + g + i / 2 % 2 * 8] =
                    acc[epi_tile / 2 + i] * row_factor.acc(i / 2 % 2);
            wg.warpgroup_barrier();
            store_some(epi_smem, at, epi_tile, epilogue);
        }
    }

private:
    // All rows of y start at a multiple of 16 bytes.
    template <class T>
    __device__ bool aligned(const void* y) const {
        return (reinterpret_cast<i64>(y) | wg.p.n * i64(sizeof(T))) % 16 == 0;
    }
    // The usual case: all 64 rows are inside the matrix, and there is neither bias nor residual.
    template <class T>
    __device__ __forceinline__ void store_whole(const Acc& acc, const EpilogueCoord& at, T* y) const {
        constexpr int PER_STORE = 16 / sizeof(T), STORES = TILE_ROWS / PER_STORE;
        const int warp = wg.thread / 32, lane = wg.thread % 32, g = lane / 4, t = lane % 4;
        auto& epi_smem =
            *reinterpret_cast<T(*)[EPI_TILE][TILE_ROWS + PER_STORE]>(wg.smem.epi_smem(wg.row_block, wg.wg_k));
        y += at.first_token * wg.p.n + at.first_row;
#pragma unroll
        for (int epi_tile = 0; epi_tile < TOKENS; epi_tile += EPI_TILE) {
            if (!wg.owns(epi_tile / EPI_TILE, epi_tiles)) continue;
            wg.warpgroup_barrier();  // the epilogue tile before is read
#pragma unroll
            for (int i = 0; i < EPI_TILE / 8; i += 2) {
                // Pairs of tokens 2t and 2t + 1: of rows g and g + 8, then of these rows and the next 8 tokens; without
                // such, of the same tokens once more.
                T made[8];
                const int next = i + 1 < EPI_TILE / 8;
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    made[j] =
                        from_float<T>(acc[(epi_tile / 8 + i + j / 4 * next) * 4 + j % 4] * row_factor.acc(j / 2 % 2));
                if constexpr (sizeof(T) == 2) {
                    u32 pairs[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) pairs[j] = *reinterpret_cast<const u32*>(&made[2 * j]);
                    const int token = 8 * i + lane / 16 * 8 * next + lane % 8, row = 16 * warp + lane / 8 % 2 * 8;
                    stmatrix_x4_trans(shared_address(&epi_smem[token][row]), pairs);
                } else {
#pragma unroll
                    for (int j = 0; j < 8; ++j)
                        epi_smem[8 * (i + j / 4 * next) + 2 * t + j % 2][16 * warp + g + j / 2 % 2 * 8] = made[j];
                }
            }
            wg.warpgroup_barrier();
#pragma unroll
            for (int i = 0; i < EPI_TILE * STORES; i += WARPGROUP_THREADS) {
                const int token = (i + wg.thread) / STORES, row = (i + wg.thread) % STORES * PER_STORE;
                if (epi_tile + token >= at.skip && epi_tile + token < at.tokens)
                    *reinterpret_cast<uint4*>(&y[(epi_tile + token) * wg.p.n + row]) =
                        *reinterpret_cast<const uint4*>(&epi_smem[token][row]);
            }
        }
    }
    // The general case: the part of an epilogue tile inside the matrix, with bias and residual.
    __device__ __forceinline__ void store_some(const EpilogueSmem<Config>& epi_smem, const EpilogueCoord& at,
                                               int epi_tile, const Epilogue& epilogue) const {
        const int from = max(at.skip - epi_tile, 0), to = min(at.tokens - epi_tile, EPI_TILE);
#pragma unroll 1
        for (int i = from * TILE_ROWS + wg.thread; i < to * TILE_ROWS; i += WARPGROUP_THREADS) {
            const int token = i / TILE_ROWS, row = i % TILE_ROWS;
            if (row < at.rows)
                epilogue.store((at.first_token + epi_tile + token) * wg.p.n, at.first_row + row, epi_smem[token][row]);
        }
    }
};

}  // namespace qgemm
