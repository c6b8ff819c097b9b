// pack: blocks [n, row_blocks] as they lie in a file -> tiles, and a bound of the magnitude of the finite weights.
//
// The piece is copied into shared memory; a warp gathers the words of the lanes of one t of one span, then the fields
// per block of every PIECE_WARPS-th tile. What is beyond the matrix is zero. blocks: whole words, to be read up to the
// end of the last.
// Template: Format, TILES, LARGEST_CODE.
#include "blocks.cuh"

// The words of lane (g, t) of a span, from rows g and g + 8 of a tile.
template <class Codes, int T, int SPAN>
__device__ void pack_codes(const u8* const (&rows)[2], int owner, u32* to) {
    alignas(16) u32 words[Codes::BITS] = {};
#pragma unroll
    for (int step = 0; step < SPAN_STEPS; ++step)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int column = SPAN * SPAN_COLUMNS + column_of(step, j, T);
                const int bit = Codes::BITS * Codes::slot(column % BLOCK_WEIGHTS);
                const int byte = column / BLOCK_WEIGHTS * BLOCK_BYTES + Codes::AT + bit / 8;
                const u32 code = rows[r][byte] >> bit % 8 & ((1 << Codes::BITS) - 1);
                const Place at = place<Codes::BITS>(step, j, r);
                words[at.word] |= code << at.bit;
            }
#pragma unroll
    for (int word = 0; word < Codes::BITS; word += Codes::CHUNK)
        load_words<Codes::CHUNK>(to + word_index<Codes>(owner, T, word), &words[word]);
}

// An owner's share of a field per block.
template <class PerBlock>
__device__ void pack_field(const u8* const (&rows)[2], int owner, u32* to) {
    using From = Share<PerBlock>;
#pragma unroll
    for (int word = 0; word < From::BYTES / 4; ++word) {
        u32 bytes = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) bytes |= u32(rows[From::row(4 * word + i)][From::byte(4 * word + i)]) << 8 * i;
        to[owner * (From::BYTES / 4) + word] = bytes;
    }
}

// LARGEST_CODE * |scale| + |minimum| at most, of the scales of an owner's rows in a tile; infinity and NaN do not count.
__device__ float largest_weight(const Tile& tile, int owner) {
    float largest = 0;
    const auto count = [&](float scale, float minimum) {
        const float bound = __fadd_rn(__fmul_rn(LARGEST_CODE, fabsf(scale)), fabsf(minimum));
        if (bound < __int_as_float(0x7f800000)) largest = fmaxf(largest, bound);
    };
    for (int index = 0; index < SPANS * SPAN_SCALES; ++index) {
        const float2 scale = tile.fields.scale(owner / 8, owner % 8, index);
        const float2 minimum = tile.fields.minimum(owner / 8, owner % 8, index);
        count(scale.x, minimum.x);
        count(scale.y, minimum.y);
    }
    return largest;
}

extern "C" __global__ void __launch_bounds__(PIECE_THREADS)
    pack(const u32* __restrict__ blocks, Tile* tiles, u32* largest, i64 n, i64 row_blocks, i64 along) {
    __shared__ u32 staged[TILE_ROWS * ROW_WORDS];
    Piece piece(staged, n, row_blocks, along);
    const int warp = threadIdx.x / 32, owner = threadIdx.x % 32;
    tiles += piece.strip * along + piece.first_tile;

    piece.for_words([&](u32& word, i64 index, int first, int end) {
        u32 bytes = end > 0 ? blocks[index] : 0;
        if (end > 0 && end < 4) bytes &= (1u << 8 * end) - 1;
        word = bytes;
    });
    __syncthreads();

    const u8* const rows[2] = {piece.row(owner, 0), piece.row(owner, 1)};
    const auto rows_of = [&](int tile, const auto& work) {
        const int at = tile * TILE_BLOCKS * BLOCK_BYTES;
        const u8* const shifted[2] = {rows[0] + at, rows[1] + at};
        work(shifted, reinterpret_cast<u8*>(&tiles[tile]));
    };
    for_warp(warp, [&](auto mine) {
        constexpr int T = decltype(mine)::value % 4, SPAN = decltype(mine)::value / 4;
#pragma unroll 1
        for (int tile = 0; tile < piece.tiles; ++tile)
            rows_of(tile, [&](const auto& from, u8* to) {
                for_codes([&](auto codes) {
                    using Codes = decltype(codes);
                    u8* at = to + SPAN * sizeof(SpanOf<WARPS>) + Codes::TO;
                    pack_codes<Codes, T, SPAN>(from, owner, reinterpret_cast<u32*>(at));
                });
            });
    });

    float bound = 0;
    for (int tile = warp; tile < piece.tiles; tile += PIECE_WARPS) {
        rows_of(tile, [&](const auto& from, u8* to) {
            for_per_block([&](auto field) {
                using Field = decltype(field);
                pack_field<Field>(from, owner, reinterpret_cast<u32*>(to + Field::TO));
            });
        });
        __syncwarp();  // orders what is read now, as other types, after what was written
        bound = fmaxf(bound, largest_weight(tiles[tile], owner));
    }
    for (int lanes = 16; lanes; lanes /= 2) bound = fmaxf(bound, __shfl_xor_sync(~0u, bound, lanes));
    // Floats that are not negative compare like their bits. Few values are larger than what is seen, even if it is old.
    const u32 bits = __float_as_uint(bound);
    if (owner == 0 && bits > *static_cast<volatile u32*>(largest)) atomicMax(largest, bits);
}
