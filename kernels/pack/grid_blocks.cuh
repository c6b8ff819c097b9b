// Blocks of grids in shared memory <-> tiles, for pack and unpack: a tile is a permutation of bits
// (qgemm/codec/layouts/grid.py). Panel: see panel.cuh.
#pragma once

#include "codes/grid.cuh"
#include "pack/panel.cuh"

namespace qgemm {

// Up to eight bits of a row of blocks.
__device__ inline u32 read_bits(const u8* row, int first, int count) {
    const u8* byte = row + first / 8;
    u32 bits = byte[0];
    if (first % 8 + count > 8) bits |= u32(byte[1]) << 8;
    return bits >> first % 8 & ((1u << count) - 1);
}

__device__ inline void set_bits(u8* byte, u32 bits) {
    const int in_word = __cvta_generic_to_shared(byte) % 4;
    atomicOr(reinterpret_cast<u32*>(byte - in_word), bits << 8 * in_word);
}
__device__ inline void write_bits(u8* row, int first, int count, u32 bits) {
    bits <<= first % 8;
    set_bits(row + first / 8, bits & 0xff);
    if (first % 8 + count > 8) set_bits(row + first / 8 + 1, bits >> 8);
}

// The number of a lane. for_runs calls visit(run of bits, first bit in the block). number: its index in 16 rows; -1 for
// lanes without a number.
template <class Field>
struct GridNumber {
    static constexpr int COUNT = 8 * Field::OWNERS;
    int number, base;

    __device__ GridNumber(int k_block, int lane)
        : number(lane < COUNT ? lane : -1), base(Field::base(k_block, lane % Field::OWNERS)) {}
    template <class Visit>
    __device__ void for_runs(Visit visit) const {
#pragma unroll
        for (int i = 0; i < Field::RUNS; ++i) visit(Field::run(i), base + Field::run(i).at);
    }
};

// The numbers of 16 rows of a k_block -> memory.
template <class Field, class Panel>
__device__ inline void gather_numbers(const Panel& panel, int tile, int k_block, int m16, int lane, u8* to) {
    using Type = typename Field::Type;
    const GridNumber<Field> own(k_block, lane);
    if (own.number < 0) return;
    const int g = lane / Field::OWNERS;
    const u8* const rows[2] = {panel.row(16 * m16 + g, tile), panel.row(16 * m16 + g + 8, tile)};
    Type bits = 0;
    own.for_runs(
        [&](BitRun run, int first) { bits |= Type(Type(read_bits(rows[run.row], first, run.count)) << run.to); });
    reinterpret_cast<Type*>(to + Field::TO)[own.COUNT * m16 + own.number] = bits;
}

// The inverse: memory -> the numbers of 16 rows of a k_block.
template <class Field, class Panel>
__device__ inline void scatter_numbers(const Panel& panel, int tile, int k_block, int m16, int lane, const u8* from) {
    using Type = typename Field::Type;
    const GridNumber<Field> own(k_block, lane);
    if (own.number < 0) return;
    const int g = lane / Field::OWNERS;
    u8* const rows[2] = {panel.row(16 * m16 + g, tile), panel.row(16 * m16 + g + 8, tile)};
    const Type bits = reinterpret_cast<const Type*>(from + Field::TO)[own.COUNT * m16 + own.number];
    own.for_runs([&](BitRun run, int first) {
        write_bits(rows[run.row], first, run.count, u32(bits >> run.to) & ((1u << run.count) - 1));
    });
}

// Calls visit(tile, index of a word in its fields, row of blocks, first of the word's bits in Field) for all words.
template <class Field, class Panel, class Visit>
__device__ inline void for_block_words(const Panel& panel, Visit visit) {
    constexpr int WORDS = TILE_ROWS * Field::WORDS;
    for (int i = threadIdx.x; i < panel.tiles * WORDS; i += Panel::THREADS) {
        const int tile = i / WORDS, word = i % WORDS;  // [warp][g][word][r]
        const int owner = word / (2 * Field::WORDS), r = word % 2;
        visit(tile, Field::TO / 2 + word, panel.row(16 * (owner / 8) + 8 * r + owner % 8, tile),
              16 * (word / 2 % Field::WORDS));
    }
}

template <class Field, class Panel, class Fields>
__device__ inline void gather_words(const Panel& panel, Fields* fields) {
    for_block_words<Field>(panel, [&](int tile, int to, const u8* row, int first) {
        u32 word = 0;
        for (int bit = 0; bit < 16; ++bit) word |= read_bits(row, Field::at(first + bit), 1) << bit;
        reinterpret_cast<u16*>(&fields[tile])[to] = word;
    });
}

template <class Field, class Panel, class Tile>
__device__ inline void scatter_words(const Panel& panel, const Tile* tiles) {
    for_block_words<Field>(panel, [&](int tile, int from, u8* row, int first) {
        const u32 word = reinterpret_cast<const u16*>(&tiles[tile].fields)[from];
        for (int bit = 0; bit < 16; ++bit) write_bits(row, Field::at(first + bit), 1, word >> bit & 1);
    });
}

}  // namespace qgemm
