// pack: blocks [n, blocks_per_row] as they lie in a file -> tiles [row_blocks, along], and for each row of the
// row_blocks a bound of the magnitude of its finite weights and of the factors of their scales.
//
// The panel is copied into shared memory. A warp gathers the words of a k_block of a group of 16 rows; the fields per
// block are gathered in shared memory, from which bounds are computed. Rows and blocks beyond the matrix are zero.
// Config: Format, KBlock, K_BLOCKS, Blocks, TILES, THREADS.
#include "pack/grid_blocks.cuh"
#include "pack/panel.cuh"
#include "ptx/cp_async_zfill.cuh"
#include "pack/ternary_blocks.cuh"

namespace qgemm {

// A lane's words of a k_block, from rows g and g + 8 of the k_block's tile.
template <class Codes>
__device__ void gather_codes(const u8* const (&rows)[2], int k_block, int lane, u32 (&words)[Codes::BITS]) {
    const int base = Codes::base(k_block, lane % 4), first = base / 8, shift = base % 8;
    for_codes<Codes>([&](const BitPosition& position, int r, int bit) {
        const u32 code = rows[r][first + bit / 8] >> shift >> bit % 8 & Codes::MASK;
        words[position.word] |= code << position.bit;
    });
}

// A lane's words -> a k_block in memory.
template <class Codes>
__device__ void put_codes(const u32 (&words)[Codes::BITS], int m16, int lane, void* to) {
#pragma unroll
    for (int word = 0; word < Codes::BITS; word += Codes::LOAD_WORDS)
        load_words<Codes::LOAD_WORDS>(static_cast<u32*>(to) + Codes::LOAD_WORDS * chunk_index<Codes>(m16, lane, word),
                                      &words[word]);
}

// A thread's largest finite bounds of weights in rows g and g + 8 of a row group, as bits of floats: floats that are
// not negative compare like their bits.
struct RowAbsmax {
    u32 largest[2] = {};

    __device__ void add(float largest_code, float2 scale, float2 minimum) {
        const float bounds[2] = {__fadd_rn(__fmul_rn(largest_code, fabsf(scale.x)), fabsf(minimum.x)),
                                 __fadd_rn(__fmul_rn(largest_code, fabsf(scale.y)), fabsf(minimum.y))};
#pragma unroll
        for (int r = 0; r < 2; ++r)  // neither infinity nor NaN
            if (__float_as_uint(bounds[r]) < 0x7f800000) largest[r] = max(largest[r], __float_as_uint(bounds[r]));
    }
};

template <class Config>
__device__ __forceinline__ void pack(const uint4* blocks, typename Config::Tile* tiles, u32* row_absmax, i64 n,
                                     i64 blocks_per_row, i64 along) {
    using Format = typename Config::TileFormat;
    using Blocks = typename Config::Blocks;
    constexpr int THREADS = Config::THREADS;
    __shared__ uint4 staged[TILE_ROWS * Config::ROW_CHUNKS];
    __shared__ Format fields[Config::TILES];
    const Panel<Config> panel(staged, n, blocks_per_row, along);
    const int lane = threadIdx.x % 32, g = lane / 4;
    tiles += panel.row_block * along + panel.first_tile;

    panel.for_chunks([&](uint4& chunk, i64 index, int begin, int end) {
        cp_async_zfill(chunk, blocks + (end > 0 ? index : 0), end < 0 ? 0 : end < 16 ? end : 16);
    });
    cp_async_wait_all();
    __syncthreads();

    panel.for_m16_tiles([&](int tile, int k_block, int m16) {
        if constexpr (Blocks::GRID) {
            Blocks::for_numbers([&](auto field) {
                u8* to = reinterpret_cast<u8*>(&tiles[tile].k_blocks[k_block]);
                gather_numbers<decltype(field)>(panel, tile, k_block, m16, lane, to);
            });
        } else if constexpr (Blocks::TERNARY) {
            const u8* const rows[2] = {panel.row(16 * m16 + g, tile), panel.row(16 * m16 + g + 8, tile)};
            gather_digits<Blocks>(rows, k_block, m16, lane, tiles[tile].k_blocks[k_block]);
        } else {
            const u8* const rows[2] = {panel.row(16 * m16 + g, tile), panel.row(16 * m16 + g + 8, tile)};
            u8* to = reinterpret_cast<u8*>(&tiles[tile].k_blocks[k_block]);
            typename Format::Codes share = {};
            Blocks::for_codes([&](auto codes) {
                using Codes = decltype(codes);
                gather_codes<Codes>(rows, k_block, lane, Codes::words(share));
            });
            Format::to_tile(share);
            Blocks::for_codes([&](auto codes) {
                using Codes = decltype(codes);
                put_codes<Codes>(Codes::words(share), m16, lane, to + Codes::TO);
            });
        }
    });
    if constexpr (Blocks::GRID) {
        Blocks::for_words([&](auto field) { gather_words<decltype(field)>(panel, fields); });
    } else {
        Blocks::for_per_block([&](auto field) {
            using Field = decltype(field);
            panel.template for_units<Field>(
                [&](int tile, int offset, const u8* byte) { reinterpret_cast<u8*>(&fields[tile])[offset] = *byte; });
        });
    }
    __syncthreads();

    constexpr int CHUNKS = sizeof(Format) / 16;
    for (int i = threadIdx.x; i < panel.tiles * CHUNKS; i += THREADS)
        reinterpret_cast<uint4*>(&tiles[i / CHUNKS].fields)[i % CHUNKS] = reinterpret_cast<const uint4*>(fields)[i];

    static_assert(THREADS % 32 == 0, "a thread reads the same rows of every tile");
    const int m16 = lane / 8, row = lane % 8;
    RowAbsmax absmax;
    const int groups = panel.bytes / Blocks::BYTES * (Blocks::WEIGHTS / Format::GROUP_SIZE);  // groups with one scale
    for (int i = threadIdx.x / 32; i < groups; i += THREADS / 32) {
        const Format& tile = fields[i / Config::TILE_SCALES];
        const int index = i % Config::TILE_SCALES;
        absmax.add(Format::LARGEST_CODE, tile.scale(m16, row, index), tile.minimum(m16, row, index));
        // A super-block's factors are larger than their products where the integers are 0.
        if constexpr (Format::SCALE_FACTORS == 2)
            absmax.add(Format::LARGEST_CODE, __half22float2(tile.half_scale(m16, row, index)),
                       __half22float2(tile.half_minimum(m16, row, index)));
    }
    row_absmax += panel.row_block * TILE_ROWS + 16 * m16 + row;
#pragma unroll
    for (int r = 0; r < 2; ++r)  // most threads skip the atomic
        if (panel.holds(16 * m16 + row + 8 * r) && absmax.largest[r] > row_absmax[8 * r])
            atomicMax(&row_absmax[8 * r], absmax.largest[r]);
}

using PanelOf = PanelConfig<Config>;

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::PanelOf::THREADS)
    pack(const uint4* __restrict__ blocks, qgemm::PanelOf::Tile* __restrict__ tiles, qgemm::u32* row_absmax,
         qgemm::i64 n, qgemm::i64 blocks_per_row, qgemm::i64 along) {
    qgemm::pack<qgemm::PanelOf>(blocks, tiles, row_absmax, n, blocks_per_row, along);
}
