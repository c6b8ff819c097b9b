// restore: tiles -> blocks [n, row_blocks] as they lie in a file; the inverse of pack.
//
// A warp gathers every PIECE_WARPS-th byte of codes of its lanes' rows in shared memory, and the fields per block of
// every PIECE_WARPS-th tile; then the rows are written word by word, bytes where a word belongs to two pieces.
// Template: Format, TILES.
#include "blocks.cuh"

// A byte of codes of rows g and g + 8 of a tile.
template <class Codes>
__device__ void restore_codes(const u32* from, int owner, int index, u8* const (&rows)[2]) {
    constexpr int PER_BYTE = 8 / Codes::BITS, PER_BLOCK = BLOCK_WEIGHTS / PER_BYTE;
    u32 bytes[2] = {};
#pragma unroll
    for (int i = 0; i < PER_BYTE; ++i) {
        const int weight = Codes::weight(index % PER_BLOCK * PER_BYTE + i);
        const int column = index / PER_BLOCK * BLOCK_WEIGHTS + weight, span = column / SPAN_COLUMNS;
        const int step = column % SPAN_COLUMNS / 16, t = column % 8 / 2, j = 2 * (column % 2) + column % 16 / 8;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const Place at = place<Codes::BITS>(step, j, r);
            const int word = span * int(sizeof(SpanOf<WARPS>) / 4) + word_index<Codes>(owner, t, at.word);
            bytes[r] |= (__ldg(from + word) >> at.bit & ((1 << Codes::BITS) - 1)) << Codes::BITS * i;
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) rows[r][index / PER_BLOCK * BLOCK_BYTES + Codes::AT + index % PER_BLOCK] = bytes[r];
}

// An owner's share of a field per block.
template <class PerBlock>
__device__ void restore_field(const u32* from, int owner, u8* const (&rows)[2]) {
    using To = Share<PerBlock>;
#pragma unroll
    for (int i = 0; i < To::BYTES; ++i)
        rows[To::row(i)][To::byte(i)] = __ldg(from + owner * (To::BYTES / 4) + i / 4) >> 8 * (i % 4);
}

extern "C" __global__ void __launch_bounds__(PIECE_THREADS)
    restore(const Tile* __restrict__ tiles, u32* blocks, i64 n, i64 row_blocks, i64 along) {
    __shared__ u32 staged[TILE_ROWS * ROW_WORDS];
    Piece piece(staged, n, row_blocks, along);
    const int warp = threadIdx.x / 32, owner = threadIdx.x % 32;
    tiles += piece.strip * along + piece.first_tile;

    u8* const rows[2] = {piece.row(owner, 0), piece.row(owner, 1)};
    const auto rows_of = [&](int tile, const auto& work) {
        const int at = tile * TILE_BLOCKS * BLOCK_BYTES;
        u8* const shifted[2] = {rows[0] + at, rows[1] + at};
        work(reinterpret_cast<const u8*>(&tiles[tile]), shifted);
    };
    for_warp(warp, [&](auto mine) {
#pragma unroll 1
        for (int tile = 0; tile < piece.tiles; ++tile)
            rows_of(tile, [&](const u8* from, const auto& to) {
                for_codes([&](auto codes) {
                    using Codes = decltype(codes);
                    const u32* at = reinterpret_cast<const u32*>(from + Codes::TO);
#pragma unroll
                    for (int i = decltype(mine)::value; i < TILE_COLUMNS * Codes::BITS / 8; i += PIECE_WARPS)
                        restore_codes<Codes>(at, owner, i, to);
                });
            });
    });
    for (int tile = warp; tile < piece.tiles; tile += PIECE_WARPS)
        rows_of(tile, [&](const u8* from, const auto& to) {
            for_per_block([&](auto field) {
                using Field = decltype(field);
                restore_field<Field>(reinterpret_cast<const u32*>(from + Field::TO), owner, to);
            });
        });
    __syncthreads();

    piece.for_words([&](u32& word, i64 index, int first, int end) {
        if (first <= 0 && end >= 4) {
            blocks[index] = word;
        } else {
            for (int i = max(first, 0); i < min(end, 4); ++i) reinterpret_cast<u8*>(&blocks[index])[i] = word >> 8 * i;
        }
    });
}
