// Blocks of a file in shared memory: what pack (blocks -> tiles) and unpack (tiles -> blocks) share.
//
// A CTA owns a panel of a row_block: 64 rows, TILES tiles wide. Where things stand are the rules of
// qgemm/cuda/layout/tile.py; the layout of a block is generated from the format's dtype and slots. Template: Format,
// TILES, THREADS.
#pragma once

#include "tile.cuh"

constexpr int TILE_BLOCKS = TILE_COLUMNS / BLOCK_WEIGHTS;  // of a row
constexpr int PANEL_BYTES = TILES * TILE_BLOCKS * BLOCK_BYTES;
// Chunks of 16 bytes, the first and the last in part; odd against bank conflicts between eight rows.
constexpr int ROW_CHUNKS = (PANEL_BYTES + 15 + 15) / 16 | 1;

// Rule one: where the code of a step, the j-th of a lane's columns and row g + 8 r stands in the words of its lane.
struct BitPosition {
    int word, bit;
};

template <int BITS>
constexpr BitPosition position_of_code(int step, int j, int r) {
    constexpr int p = BITS < 4 ? 4 / BITS : 1;
    const int bit = BITS * (2 * p * (step / p) + p * r + step % p);
    return {bit / 8, 8 * j + bit % 8};
}

// Rule two: where one bit of such a code stands if it counts levels, in an index of several.
template <int BITS, int PAIRS>
constexpr BitPosition position_of_bit(int step, int j, int r, int plane) {
    constexpr int SIZE = 2 * PAIRS * BITS, PER_WORD = 32 / SIZE;
    const int pair = 4 * step + j % 2 * 2 + r, index = pair / PAIRS,
              bit = (j / 2 * PAIRS + pair % PAIRS) * BITS + plane;
    if (index >= PER_WORD * BITS) return {bit / 2, 30 + bit % 2};
    return {index / PER_WORD, index % PER_WORD * SIZE + bit};
}

// Where a code stands whose bits lie together in a block, or its bit of one of the block's planes.
template <class Codes>
constexpr BitPosition position(int step, int j, int r, int plane) {
    return Codes::PLANES == 1 ? position_of_code<Codes::BITS>(step, j, r)
                              : position_of_bit<Codes::BITS, Codes::PAIRS>(step, j, r, plane);
}

// visit(place in a lane's words, row g + 8 r, bit in its block from `base` on) for every code of a lane, or bit of one.
template <class Codes, class Visit>
__device__ inline void for_codes(Visit visit) {
#pragma unroll
    for (int step = 0; step < K_BLOCK_STEPS; ++step)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int plane = 0; plane < Codes::PLANES; ++plane)
                    visit(position<Codes>(step, j, r, plane), r, Codes::offset(step, j) + plane * BLOCK_WEIGHTS);
}

// The index, among the chunks of the codes of a k_block, of the chunk that holds a lane's word.
template <class Codes>
__device__ inline int chunk_index(int m16, int lane, int word) {
    return (m16 * Codes::PARTS + word / Codes::LOAD_WORDS) * 32 + lane;
}

// The rows of a panel: where they are in memory, and in shared memory, where a row begins inside a chunk as in memory.
struct Panel {
    u8* staged;
    i64 row_block, first_tile, row_bytes, n;
    int tiles, bytes;  // of a row, without padding

    __device__ Panel(uint4* staged, i64 n, i64 blocks_per_row, i64 along)
        : staged(reinterpret_cast<u8*>(staged)), n(n) {
        const i64 panels = (along + TILES - 1) / TILES;
        row_block = blockIdx.x / panels;
        first_tile = blockIdx.x % panels * TILES;
        row_bytes = blocks_per_row * BLOCK_BYTES;
        tiles = along - first_tile < TILES ? along - first_tile : TILES;
        const i64 rest = row_bytes - first_tile * TILE_BLOCKS * BLOCK_BYTES;
        bytes = rest < PANEL_BYTES ? rest : PANEL_BYTES;
    }
    __device__ i64 at(int row) const {
        return (row_block * TILE_ROWS + row) * row_bytes + first_tile * TILE_BLOCKS * BLOCK_BYTES;
    }
    __device__ int skip(int row) const { return u32(at(row)) % 16; }  // bytes of its first chunk before it
    __device__ bool holds(int row) const { return row_block * TILE_ROWS + row < n; }
    // A row of blocks from a tile on.
    __device__ u8* row(int row, int tile) const {
        return staged + row * ROW_CHUNKS * 16 + skip(row) + tile * TILE_BLOCKS * BLOCK_BYTES;
    }
    // visit(staged chunk, its index in memory, where the row begins and ends relative to it)
    template <class Visit>
    __device__ void for_chunks(Visit visit) const {
        for (int i = threadIdx.x; i < TILE_ROWS * ROW_CHUNKS; i += THREADS) {
            const int row = i / ROW_CHUNKS, chunk = i % ROW_CHUNKS;
            const int begin = skip(row) - 16 * chunk;
            visit(reinterpret_cast<uint4*>(staged)[i], at(row) / 16 + chunk, begin, holds(row) ? begin + bytes : 0);
        }
    }
    // visit(tile, k_block, group of rows): a warp each
    template <class Visit>
    __device__ void for_m16_tiles(Visit visit) const {
        for (int i = threadIdx.x / 32; i < tiles * K_BLOCKS * WARPS; i += THREADS / 32)
            visit(i / WARPS / K_BLOCKS, i / WARPS % K_BLOCKS, i % WARPS);
    }
    // Rule three: the pairs of a field's units in rows g and g + 8, a thread each.
    // visit(tile, a byte of the tile's fields, the byte of a row of blocks that it is)
    template <class PerBlock, class Visit>
    __device__ void for_units(Visit visit) const {
        constexpr int UNIT = PerBlock::UNIT, UNITS = PerBlock::BYTES / UNIT,
                      PAIRS = TILE_ROWS / 2 * TILE_BLOCKS * UNITS;
        for (int i = threadIdx.x; i < tiles * PAIRS; i += THREADS) {
            const int tile = i / PAIRS, pair = i % PAIRS;
            const int block = pair / UNITS % TILE_BLOCKS, owner = pair / UNITS / TILE_BLOCKS;  // 8 * group + g
            const int from = block * BLOCK_BYTES + PerBlock::AT + pair % UNITS * UNIT;
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int byte = 0; byte < UNIT; ++byte)
                    visit(tile, PerBlock::TO + (2 * pair + r) * UNIT + byte,
                          row(16 * (owner / 8) + 8 * r + owner % 8, tile) + from + byte);
        }
    }
};
