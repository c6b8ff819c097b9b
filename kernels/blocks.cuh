// Blocks of a file in shared memory: what pack (blocks -> tiles) and restore (tiles -> blocks) share.
//
// A CTA owns a piece of a strip: 64 rows, TILES tiles wide. A lane owns rows g and g + 8 of a group of 16 rows, with
// lane = 8 * group + g, so that every position but those is a constant of the compiler: the two rules of
// qgemm/tiles.py, and the blocks' layout, generated from the format's dtype and slots.
#pragma once

#include "tile.cuh"

constexpr int TILE_BLOCKS = TILE_COLUMNS / BLOCK_WEIGHTS;       // of a row
constexpr int PIECE_BYTES = TILES * TILE_BLOCKS * BLOCK_BYTES;  // of a row
constexpr int ROW_WORDS = (PIECE_BYTES + 3 + 3) / 4 | 1;        // begins inside a word; odd: no bank conflicts
constexpr int PIECE_WARPS = 4 * SPANS, PIECE_THREADS = 32 * PIECE_WARPS;  // a warp for each t of each span

template <int I>
struct Constant {
    static constexpr int value = I;
};

// work(Constant<warp>()), so that what depends on the warp is known to the compiler.
template <int I = 0, class Work>
__device__ inline void for_warp(int warp, Work work) {
    if (warp == I) {
        work(Constant<I>());
    } else if constexpr (I + 1 < PIECE_WARPS) {
        for_warp<I + 1>(warp, work);
    }
}

// Where the code of a step and column stands in the words of its lane: rule one of qgemm/tiles.py.
struct Place {
    int word, bit;
};

template <int BITS>
__device__ constexpr Place place(int step, int j, int r) {
    constexpr int p = BITS < 4 ? 4 / BITS : 1;
    const int bit = BITS * (2 * p * (step / p) + p * r + step % p);
    return {bit / 8, 8 * j + bit % 8};
}

// The j-th column of a step that lane t holds: 2t, 2t + 8, 2t + 1, 2t + 9.
__device__ constexpr int column_of(int step, int j, int t) { return 16 * step + 2 * t + j / 2 + 8 * (j % 2); }

// The index in a span's words of word `word` of lane (g, t); `owner` is 8 * group + g.
template <class Codes>
__device__ constexpr int word_index(int owner, int t, int word) {
    const int part = word / Codes::CHUNK, lane = 4 * (owner % 8) + t;
    return ((owner / 8 * Codes::PARTS + part) * 32 + lane) * Codes::CHUNK + word % Codes::CHUNK;
}

// Where byte i of an owner's share of a field per block comes from: rule two of qgemm/tiles.py.
template <class PerBlock>
struct Share {
    static constexpr int BYTES = 2 * TILE_BLOCKS * PerBlock::BYTES;
    static_assert(BYTES % 4 == 0, "an owner's share of a field is whole words");
    __device__ static constexpr int row(int i) { return i / PerBlock::UNIT % 2; }
    __device__ static constexpr int byte(int i) {
        const int block = i / (2 * PerBlock::BYTES), unit = i % (2 * PerBlock::BYTES) / (2 * PerBlock::UNIT);
        return block * BLOCK_BYTES + PerBlock::AT + unit * PerBlock::UNIT + i % PerBlock::UNIT;
    }
};

// The rows of a piece: where they are in memory and in shared memory, where a row begins in the middle of a word, as in
// memory. Rows lie in the order (r, owner): the 32 lanes read 32 rows in a row.
struct Piece {
    u32 (&staged)[TILE_ROWS * ROW_WORDS];
    i64 strip, first_tile, row_bytes, n;
    int tiles, bytes;  // of a row, without padding

    __device__ Piece(u32 (&staged)[TILE_ROWS * ROW_WORDS], i64 n, i64 row_blocks, i64 along) : staged(staged), n(n) {
        const i64 pieces = (along + TILES - 1) / TILES, left = along - blockIdx.x % pieces * TILES;
        strip = blockIdx.x / pieces;
        first_tile = blockIdx.x % pieces * TILES;
        row_bytes = row_blocks * BLOCK_BYTES;
        tiles = left < TILES ? left : TILES;
        const i64 rest = row_bytes - from();
        bytes = rest < PIECE_BYTES ? rest : PIECE_BYTES;
    }
    __device__ i64 from() const { return first_tile * TILE_BLOCKS * BLOCK_BYTES; }
    __device__ i64 at(int row) const { return (strip * TILE_ROWS + row) * row_bytes + from(); }
    __device__ static int place_of(int row) { return 32 * (row / 8 % 2) + 8 * (row / 16) + row % 8; }
    __device__ u8* row(int owner, int r) const {
        const i64 begin = at(16 * (owner / 8) + 8 * r + owner % 8);
        return reinterpret_cast<u8*>(&staged[(32 * r + owner) * ROW_WORDS]) + begin % 4;
    }
    // visit(staged word, its index in memory, the row's first and last byte relative to it)
    template <class Visit>
    __device__ void for_words(Visit visit) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 4
        for (int row = warp; row < TILE_ROWS; row += PIECE_WARPS) {
            const i64 begin = at(row);
            const int skip = begin % 4, end = strip * TILE_ROWS + row < n ? skip + bytes : 0;
            for (int i = lane; i < ROW_WORDS; i += 32)
                visit(staged[place_of(row) * ROW_WORDS + i], begin / 4 + i, skip - 4 * i, end - 4 * i);
        }
    }
};
