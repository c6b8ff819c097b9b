// Sm80EightBits<Config>: constants, stages and loaders of prefill_sm80_eight_bits. A k_iter has the EIGHT_BIT_COLUMNS
// that share a scale of W and one of x, in whole tiles. A warp multiplies all of its columns, so that it scales sums of
// whole groups.
//
// Config: Sm80 of config.cuh with WARP_SPLIT_K 1 and STAGES at least 2, and
//   E4M3         e4m3 floats instead of int8
//   X_ROW_BYTES  a token's codes in a stage
//   LEAST_LEVEL, GREATEST_LEVEL   of the format
#pragma once

#include "eight_bit_layout.cuh"
#include "pipeline.cuh"

namespace qgemm {

template <class Base>
struct Sm80EightBits : Sm80<Base> {
    using Sm80<Base>::TILE_COLUMNS;
    static constexpr int K_ITER = EIGHT_BIT_COLUMNS / K_BLOCK;      // k_blocks
    static constexpr int TILES = EIGHT_BIT_COLUMNS / TILE_COLUMNS;  // per row_block and k_iter
    static_assert(Base::WARP_SPLIT_K == 1, "a warp has all columns of a group");
    static_assert(EIGHT_BIT_COLUMNS % TILE_COLUMNS == 0, "a stage has whole tiles");
    static_assert(Base::BLOCK_TOKENS % 16 == 0, "the scales of 16 tokens are adjacent");
};

// Rows of x are padded so that the eight rows of an ldmatrix are in different banks.
template <class Config>
struct EightBitStage {
    static_assert(Config::X_ROW_BYTES % 128 == 16, "rows of x are in the same banks");
    typename Config::Tile tiles[Config::ROW_BLOCKS][Config::TILES];
    signed char x[Config::BLOCK_TOKENS][Config::X_ROW_BYTES];
    float x_scales[Config::BLOCK_TOKENS];
};

// The tiles of a row_block in a stage: the Pipeline of EightBitScales.
template <class Config>
struct StageTiles {
    static constexpr int K_BLOCKS = Config::K_BLOCKS;
    const typename Config::Tile* tiles;

    __device__ const auto& codes(int k_block) const { return tiles[k_block / K_BLOCKS].k_blocks[k_block % K_BLOCKS]; }
    __device__ const auto& fields(int, int k_block, u32) const { return tiles[k_block / K_BLOCKS].fields; }
};

// Copies W, one k_iter after the other. A team of TEAM_THREADS copies a row_block's tiles, which are adjacent, as
// 16-byte chunks.
template <class Config>
struct TileLoader {
    using Tile = typename Config::Tile;
    static constexpr int TEAM_THREADS = Config::THREADS / Config::ROW_BLOCKS, TILE_CHUNKS = sizeof(Tile) / 16;
    static constexpr int CHUNKS = Config::TILES * TILE_CHUNKS;

    const uint4* from;  // this thread's first chunk
    int left;           // chunks from there to the end of the slice; none for a row_block beyond n
    u32 to;             // address of this chunk in the first stage

    __device__ TileLoader(Tile (&stage)[Config::ROW_BLOCKS][Config::TILES], const Tile* tiles,
                          const CtaTile<Config>& p) {
        const int team = threadIdx.x / TEAM_THREADS, chunk = threadIdx.x % TEAM_THREADS;
        const i64 first_row = p.first_row + team * TILE_ROWS;
        const int row_tiles = p.k_blocks / Config::K_BLOCKS, first = p.first * Config::TILES;
        const bool inside = first_row < p.n;
        const Tile* row_block = tiles + (inside ? first_row / TILE_ROWS * row_tiles + first : 0);
        from = reinterpret_cast<const uint4*>(row_block) + chunk;
        left = inside ? (min(row_tiles, p.end * Config::TILES) - first) * TILE_CHUNKS - chunk : 0;
        to = shared_address(stage[team]) + 16 * chunk;
    }
    // Copies the next k_iter to `offset` bytes after the first stage; zeros beyond the slice.
    __device__ void load(u32 offset) {
        const int chunk = threadIdx.x % TEAM_THREADS;
#pragma unroll
        for (int i = 0; i < CHUNKS; i += TEAM_THREADS)
            if (i + TEAM_THREADS <= CHUNKS || i + chunk < CHUNKS) cp_async_16(to + offset + 16 * i, from + i, i < left);
        from += CHUNKS, left -= CHUNKS;
    }
};

// Copies x and its scales, one k_iter after the other: ROW_CHUNKS threads copy a token's codes.
template <class Config>
struct EightBitXLoader {
    static constexpr int BLOCK_TOKENS = Config::BLOCK_TOKENS, ROW_CHUNKS = EIGHT_BIT_COLUMNS / 16;
    static constexpr int PASS_TOKENS = Config::THREADS / ROW_CHUNKS, SCALE_CHUNKS = BLOCK_TOKENS / 4;
    static_assert(BLOCK_TOKENS % PASS_TOKENS == 0, "all threads copy whole passes of tokens");
    static_assert(SCALE_CHUNKS <= Config::THREADS, "a thread copies a chunk of scales");

    const signed char* codes;
    const float* scales;
    i64 columns, rows;              // size of the matrix of codes
    int iters, tokens, scale_rows;  // remaining: k_iters of the slice, tokens from this thread's first on, scales
    u32 codes_to, scales_to;        // addresses in the first stage

    __device__ EightBitXLoader(EightBitStage<Config>& stage, const signed char* x, int x_rows, const CtaTile<Config>& p)
        : columns((p.k + EIGHT_BIT_COLUMNS - 1) / EIGHT_BIT_COLUMNS * EIGHT_BIT_COLUMNS),
          rows(x_rows),
          iters(p.end - p.first) {
        const int thread = threadIdx.x, token = thread / ROW_CHUNKS, chunk = thread % ROW_CHUNKS;
        codes = x + (p.first_token + token) * columns + i64(p.first) * EIGHT_BIT_COLUMNS + 16 * chunk;
        tokens = x_rows - p.first_token - token;
        codes_to = shared_address(stage.x[token]) + 16 * chunk;
        const int first = 4 * thread;  // token whose scales this thread copies
        const float* all_scales = reinterpret_cast<const float*>(x + rows * columns);
        scales = all_scales + i64(p.first) * rows + p.first_token + first;
        scale_rows = x_rows - p.first_token - first;
        scales_to = shared_address(stage.x_scales) + 16 * thread;
    }
    // Copies the next k_iter to `offset` bytes after the first stage; zeros beyond the slice and the rows of x.
    __device__ void load(u32 offset) {
#pragma unroll
        for (int i = 0; i < BLOCK_TOKENS; i += PASS_TOKENS)
            cp_async_16(codes_to + offset + Config::X_ROW_BYTES * i, codes + i * columns, iters > 0 && i < tokens);
        if (threadIdx.x < SCALE_CHUNKS) cp_async_16(scales_to + offset, scales, iters > 0 && scale_rows > 0);
        codes += EIGHT_BIT_COLUMNS, scales += rows, --iters;
    }
};

}  // namespace qgemm
