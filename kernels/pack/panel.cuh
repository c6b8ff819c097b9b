// Blocks of a file in shared memory, for pack (blocks -> tiles) and unpack (tiles -> blocks).
//
// A CTA owns a panel of a row_block: 64 rows, TILES tiles wide. The rules are those of qgemm/cuda/layout/tile.py; the
// layout of a block is generated from the format's dtype and slots.
#pragma once

#include "tile_config.cuh"
#include "types.cuh"

namespace qgemm {

// Config: Format, KBlock, K_BLOCKS, Blocks; TILES of a panel along K, THREADS.
template <class Base>
struct PanelConfig : TileConfig<Base> {
    using Blocks = typename Base::Blocks;
    // Blocks and bytes of a row of a tile, bytes of a row of a panel.
    static constexpr int TILE_BLOCKS = TileConfig<Base>::TILE_COLUMNS / Blocks::WEIGHTS;
    static constexpr int TILE_BYTES = TILE_BLOCKS * Blocks::BYTES;
    static constexpr int PANEL_BYTES = Base::TILES * TILE_BYTES;
    // 16-byte chunks of a row, the first and the last partly used; an odd number avoids bank conflicts of eight rows.
    static constexpr int ROW_CHUNKS = (PANEL_BYTES + 15 + 15) / 16 | 1;
};

// Rule one: the place, in a lane's words, of the code of a step, the lane's j-th column and row g + 8 r.
struct BitPosition {
    int word, bit;
};

template <int BITS>
constexpr BitPosition position_of_code(int step, int j, int r) {
    constexpr int p = BITS < 4 ? 4 / BITS : 1;
    const int bit = BITS * (2 * p * (step / p) + p * r + step % p);
    return {bit / 8, 8 * j + bit % 8};
}

// Rule two: the place of one bit of a codebook's code in an index of several codes.
template <int BITS, int PAIRS>
constexpr BitPosition position_of_bit(int step, int j, int r, int plane) {
    constexpr int SIZE = 2 * PAIRS * BITS, PER_WORD = 32 / SIZE;
    const int pair = 4 * step + j % 2 * 2 + r, index = pair / PAIRS,
              bit = (j / 2 * PAIRS + pair % PAIRS) * BITS + plane;
    if (index >= PER_WORD * BITS) return {bit / 2, 30 + bit % 2};
    return {index / PER_WORD, index % PER_WORD * SIZE + bit};
}

// The place of a code whose bits lie together in a block, or of one bit of a code whose bits lie in planes.
template <class Codes>
constexpr BitPosition position(int step, int j, int r, int plane) {
    return Codes::PLANES == 1 ? position_of_code<Codes::BITS>(step, j, r)
                              : position_of_bit<Codes::BITS, Codes::PAIRS>(step, j, r, plane);
}

// Calls visit(place in a lane's words, r: row g + 8 r, bit in its block from `base` on) for every code of a lane, or
// for every bit of one.
template <class Codes, class Visit>
__device__ inline void for_codes(Visit visit) {
#pragma unroll
    for (int step = 0; step < K_BLOCK / 16; ++step)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int plane = 0; plane < Codes::PLANES; ++plane)
                    visit(position<Codes>(step, j, r, plane), r, Codes::offset(step, j) + plane * Codes::PLANE_BITS);
}

// The index of the chunk with a lane's word among the chunks of a k_block's codes.
template <class Codes>
__device__ inline int chunk_index(int m16, int lane, int word) {
    return (m16 * Codes::PARTS + word / Codes::LOAD_WORDS) * 32 + lane;
}

// The rows of a panel in global and in shared memory; a row has the same offset from a 16-byte boundary in both.
template <class Config>
struct Panel {
    static constexpr int TILES = Config::TILES, THREADS = Config::THREADS, K_BLOCKS = Config::K_BLOCKS;
    static constexpr int TILE_BLOCKS = Config::TILE_BLOCKS, TILE_BYTES = Config::TILE_BYTES;
    static constexpr int ROW_CHUNKS = Config::ROW_CHUNKS;
    u8* staged;
    i64 row_block, first_tile, row_bytes, n;
    int tiles, bytes;  // in a row, without padding

    __device__ Panel(uint4* staged, i64 n, i64 blocks_per_row, i64 along)
        : staged(reinterpret_cast<u8*>(staged)), n(n) {
        const i64 panels = (along + TILES - 1) / TILES;
        row_block = blockIdx.x / panels;
        first_tile = blockIdx.x % panels * TILES;
        row_bytes = blocks_per_row * Config::Blocks::BYTES;
        tiles = along - first_tile < TILES ? along - first_tile : TILES;
        const i64 rest = row_bytes - first_tile * TILE_BYTES;
        bytes = rest < Config::PANEL_BYTES ? rest : Config::PANEL_BYTES;
    }
    __device__ i64 offset(int row) const { return (row_block * TILE_ROWS + row) * row_bytes + first_tile * TILE_BYTES; }
    __device__ int skip(int row) const { return u32(offset(row)) % 16; }  // bytes before the row in its first chunk
    __device__ bool holds(int row) const { return row_block * TILE_ROWS + row < n; }
    // The blocks of a row from a tile on.
    __device__ u8* row(int row, int tile) const {
        return staged + row * ROW_CHUNKS * 16 + skip(row) + tile * TILE_BYTES;
    }
    // Calls visit(staged chunk, its index in memory, begin and end of the row relative to the chunk).
    template <class Visit>
    __device__ void for_chunks(Visit visit) const {
        for (int i = threadIdx.x; i < TILE_ROWS * ROW_CHUNKS; i += THREADS) {
            const int row = i / ROW_CHUNKS, chunk = i % ROW_CHUNKS;
            const int begin = skip(row) - 16 * chunk;
            visit(reinterpret_cast<uint4*>(staged)[i], offset(row) / 16 + chunk, begin, holds(row) ? begin + bytes : 0);
        }
    }
    // Calls visit(tile, k_block, group of 16 rows), one warp for each.
    template <class Visit>
    __device__ void for_m16_tiles(Visit visit) const {
        for (int i = threadIdx.x / 32; i < tiles * K_BLOCKS * WARPS; i += THREADS / 32)
            visit(i / WARPS / K_BLOCKS, i / WARPS % K_BLOCKS, i % WARPS);
    }
    // Rule three: pairs of a field's units in rows g and g + 8, one thread for each pair.
    // Calls visit(tile, offset in the tile's fields, pointer to the byte of a row of blocks).
    template <class PerBlock, class Visit>
    __device__ void for_units(Visit visit) const {
        constexpr int UNIT = PerBlock::UNIT, UNITS = PerBlock::BYTES / UNIT,
                      PAIRS = TILE_ROWS / 2 * TILE_BLOCKS * UNITS;
        for (int i = threadIdx.x; i < tiles * PAIRS; i += THREADS) {
            const int tile = i / PAIRS, pair = i % PAIRS;
            const int block = pair / UNITS % TILE_BLOCKS, owner = pair / UNITS / TILE_BLOCKS;  // 8 * group + g
            const int from = block * Config::Blocks::BYTES + PerBlock::AT + pair % UNITS * UNIT;
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int byte = 0; byte < UNIT; ++byte)
                    visit(tile, PerBlock::TO + (2 * pair + r) * UNIT + byte,
                          row(16 * (owner / 8) + 8 * r + owner % 8, tile) + from + byte);
        }
    }
};

}  // namespace qgemm
