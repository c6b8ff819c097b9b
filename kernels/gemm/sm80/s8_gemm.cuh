// Main loop of gemm_sm80_s8. The copies of a step are in flight while the chunks before it are multiplied.
//
// Config: Sm80EightBits of eight_bits.cuh; STAGES: chunks of x in shared memory.
#pragma once

#include "eight_bits.cuh"
#include "gemm/eight_bit_scales.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/opaque.cuh"
#include "reduce.cuh"

namespace qgemm {

constexpr int CHUNK_TOKENS = 32;

template <class Base>
struct Sm80S8Gemm : Sm80EightBits<Base> {
    static constexpr int CHUNKS = Base::BLOCK_TOKENS / CHUNK_TOKENS, CHUNK_TILES = CHUNK_TOKENS / 8;
    static constexpr int TILES_TOGETHER = 2;  // column tiles whose integer sums a warp holds
    static_assert(Base::STAGES >= 2 && Base::STAGES <= CHUNKS,
                  "W, copied with a group's first chunk, is there in time");
};

// Rows of x are padded so that the eight rows of an ldmatrix are in different banks.
template <class Config>
struct XChunk {
    static_assert(Config::X_ROW_BYTES % 128 == 16, "rows of x are in the same banks");
    signed char codes[CHUNK_TOKENS][Config::X_ROW_BYTES];
    float scales[CHUNK_TOKENS];
};

// Packed W of a group, and chunks of x.
template <class Config>
struct S8Stages {
    typename Config::Tile tiles[Config::ROW_BLOCKS][Config::TILES];
    XChunk<Config> chunks[Config::STAGES];
};

// Dynamic shared memory of a CTA. Its tile is there because the main loop has no registers for it.
template <class Config>
struct S8Smem {
    union {
        S8Stages<Config> stages;
        ReduceSmem<Config> reduce;
    };
    CtaTile<Config> tile;
};

// Copies W and x to shared memory. Addresses are computed anew at each call, from an opaque thread number, because the
// main loop has no registers for them.
template <class Config>
struct S8Loader {
    using Tile = typename Config::Tile;
    static constexpr int TEAM_THREADS = Config::THREADS / Config::ROW_BLOCKS;  // copy a row_block
    static constexpr int TILE_CHUNKS = sizeof(Tile) / 16, W_CHUNKS = Config::TILES * TILE_CHUNKS;
    static constexpr int ROW_CHUNKS = EIGHT_BIT_COLUMNS / 16, PASS_TOKENS = Config::THREADS / ROW_CHUNKS;
    static_assert(CHUNK_TOKENS % PASS_TOKENS == 0, "all threads copy whole passes of tokens");

    S8Smem<Config>& smem;
    const Tile* tiles;
    const signed char* x;
    const int x_rows;

    // Copies W of a group; zeros beyond the slice.
    __device__ __forceinline__ void load_w(int group) const {
        const CtaTile<Config>& p = smem.tile;
        const int thread = opaque(threadIdx.x), team = thread / TEAM_THREADS, first = thread % TEAM_THREADS;
        const i64 first_row = p.first_row + team * TILE_ROWS;
        const int row_tiles = p.k_blocks / Config::K_BLOCKS, tile = group * Config::TILES;
        const bool inside = first_row < p.n && group < p.end;
        const Tile* from = tiles + (inside ? first_row / TILE_ROWS * row_tiles + tile : 0);
        const int left = inside ? (row_tiles - tile) * TILE_CHUNKS - first : 0;
        const u32 to = shared_address(smem.stages.tiles[team]) + 16 * first;
#pragma unroll
        for (int i = 0; i < W_CHUNKS; i += TEAM_THREADS)
            if (i + TEAM_THREADS <= W_CHUNKS || i + first < W_CHUNKS)
                cp_async_16(to + 16 * i, reinterpret_cast<const uint4*>(from) + first + i, i < left);
    }
    // Copies a chunk of x and its scales to a stage; zeros beyond the slice and the rows of x.
    __device__ __forceinline__ void load_x(int group, int chunk, int stage) const {
        const CtaTile<Config>& p = smem.tile;
        const int thread = opaque(threadIdx.x), row = thread / ROW_CHUNKS, column = thread % ROW_CHUNKS * 16;
        const int first = p.first_token + chunk * CHUNK_TOKENS, left = group < p.end ? x_rows - first : 0;
        const i64 columns = (p.k + EIGHT_BIT_COLUMNS - 1) / EIGHT_BIT_COLUMNS * EIGHT_BIT_COLUMNS;
        const signed char* from = x + (first + row) * columns + i64(group) * EIGHT_BIT_COLUMNS + column;
        const u32 to = shared_address(smem.stages.chunks) + stage * sizeof(XChunk<Config>);
#pragma unroll
        for (int i = 0; i < CHUNK_TOKENS; i += PASS_TOKENS)
            cp_async_16(to + (row + i) * Config::X_ROW_BYTES + column, from + i * columns, row + i < left);
        const float* scales = reinterpret_cast<const float*>(x + x_rows * columns) + i64(group) * x_rows + first;
        if (thread < CHUNK_TOKENS / 4)
            cp_async_16(to + sizeof(XChunk<Config>::codes) + 16 * thread, scales + 4 * thread, 4 * thread < left);
    }
};

// Operand A of a warp for a group of columns: the bytes of its rows, and their scales.
template <class Config>
struct GroupOfW {
    static constexpr int M16_TILES = Config::M16_TILES, STEPS = Config::K_BLOCK_STEPS, K_ITER = Config::K_ITER;
    using Format = typename Config::TileFormat;
    Bytes a[M16_TILES][K_ITER][STEPS];
    float2 unit[M16_TILES];

    // k_blocks: of the group, inside K.
    __device__ __forceinline__ GroupOfW(const StageTiles<Config>& tiles, int first_m16, int k_blocks, int lane) {
#pragma unroll
        for (int m16 = 0; m16 < M16_TILES; ++m16) {
            EightBitScales<Config> scales;
            scales.begin(tiles, 0, 0, k_blocks, first_m16 + m16, lane);
            unit[m16] = scales.unit;
#pragma unroll
            for (int k_block = 0; k_block < K_ITER; ++k_block) {
                const auto codes = tiles.codes(k_block).codes(first_m16 + m16, lane);
#pragma unroll
                for (int step = 0; step < STEPS; ++step)
                    scales.bytes(a[m16][k_block][step].row, Format::codes_f16(codes, step), k_block, step);
            }
        }
    }
    // acc += W @ x for a chunk of tokens.
    __device__ __forceinline__ void multiply(typename Config::WarpAcc& acc, const XChunk<Config>& x, int chunk,
                                             int lane) const {
        constexpr int TOGETHER = Config::TILES_TOGETHER;
        const u32 row = shared_address(x.codes[lane % 8]) + lane / 8 * 16;
#pragma unroll
        for (int first = 0; first < Config::CHUNK_TILES; first += TOGETHER) {
            int sums[M16_TILES][TOGETHER][4] = {};
#pragma unroll
            for (int k_block = 0; k_block < K_ITER; ++k_block)
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) {
                    u32 b[4];  // token g, a word for each step
                    ldmatrix_x4(b, row + k_block * K_BLOCK + 8 * (first + i) * Config::X_ROW_BYTES);
#pragma unroll
                    for (int m16 = 0; m16 < M16_TILES; ++m16)
#pragma unroll
                        for (int step = 0; step < STEPS; step += 2)
                            mma_m16n8k32(sums[m16][i], a[m16][k_block][step], a[m16][k_block][step + 1],
                                         uint2{b[step], b[step + 1]});
                }
            // The scales of tokens 2t, 2t + 1, 2t + 8 and 2t + 9 are adjacent.
#pragma unroll
            for (int i = first; i < first + TOGETHER; ++i) {
                const float4 four = reinterpret_cast<const float4*>(x.scales)[i / 2 * 4 + lane % 4];
                const float scale[2] = {i % 2 ? four.z : four.x, i % 2 ? four.w : four.y};
#pragma unroll
                for (int m16 = 0; m16 < M16_TILES; ++m16)
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        float& total = acc[m16][chunk * Config::CHUNK_TILES + i].sum[j];
                        total = __fmaf_rn(float(sums[m16][i - first][j]),
                                          scale[j % 2] * (j < 2 ? unit[m16].x : unit[m16].y), total);
                    }
            }
        }
    }
};

// acc += W @ x over the CTA's slice of K.
template <class Config>
__device__ __forceinline__ void multiply_groups(typename Config::WarpAcc& acc, const S8Loader<Config>& loader,
                                                const WarpCoord<Config>& coord) {
    constexpr int STAGES = Config::STAGES, CHUNKS = Config::CHUNKS, K_ITER = Config::K_ITER;
    const S8Smem<Config>& smem = loader.smem;
    const CtaTile<Config>& p = smem.tile;
    const StageTiles<Config> tiles{smem.stages.tiles[coord.first_m16 / WARPS]};
    loader.load_w(p.first);  // W never changes: its copy does not wait for the kernels before this one
    cp_async_commit();
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
#pragma unroll
    for (int chunk = 0; chunk < STAGES - 1; ++chunk) {
        loader.load_x(p.first, chunk, chunk);
        cp_async_commit();
    }
    cp_async_wait<STAGES - 1>();
    __syncthreads();
    int stage = 0;
#pragma unroll 1
    for (int k_iter = p.first; k_iter < p.end; ++k_iter) {
        const GroupOfW<Config> w(tiles, coord.first_m16 % WARPS, min(p.k_blocks - k_iter * K_ITER, K_ITER), coord.lane);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const int next = chunk + STAGES - 1;
            cp_async_wait<STAGES - 2>();
            __syncthreads();  // the chunk is there; all warps have read the chunk before, and have converted W
            if (chunk == 0) loader.load_w(k_iter + 1);
            loader.load_x(k_iter + next / CHUNKS, next % CHUNKS, stage ? stage - 1 : STAGES - 1);
            cp_async_commit();
            w.multiply(acc, smem.stages.chunks[stage], chunk, coord.lane);
            stage = stage + 1 < STAGES ? stage + 1 : 0;
        }
    }
    cp_async_wait<0>();  // the reduction aliases the stages
}

}  // namespace qgemm
