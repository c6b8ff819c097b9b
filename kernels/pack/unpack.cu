// unpack: tiles [row_blocks, along] -> blocks [n, blocks_per_row] as they lie in a file; the inverse of pack.
//
// A warp scatters the words of a k_block of a group of 16 rows over rows in shared memory, where other warps may write
// other bits of the same bytes. Rows are stored in chunks of 16 bytes, byte by byte where a chunk belongs to two
// panels. Config: Format, KBlock, K_BLOCKS, Blocks, TILES, THREADS.
#include "pack/grid_blocks.cuh"
#include "pack/panel.cuh"
#include "pack/ternary_blocks.cuh"

namespace qgemm {

// A lane's words of a k_block -> rows g and g + 8 of its blocks.
template <class Codes>
__device__ void scatter_codes(const u32 (&words)[Codes::BITS], int k_block, int lane, u8* const (&rows)[2]) {
    const int base = Codes::base(k_block, lane % 4), first = base / 8, shift = base % 8;
    for_codes<Codes>([&](const BitPosition& position, int r, int bit) {
        const u32 code = words[position.word] >> position.bit & Codes::MASK;
        set_bits(&rows[r][first + bit / 8], code << shift << bit % 8);
    });
}

template <class Config>
__device__ __forceinline__ void unpack(const typename Config::Tile* tiles, uint4* blocks, i64 n, i64 blocks_per_row,
                                       i64 along) {
    using Format = typename Config::TileFormat;
    using Blocks = typename Config::Blocks;
    __shared__ uint4 staged[TILE_ROWS * Config::ROW_CHUNKS];
    const Panel<Config> panel(staged, n, blocks_per_row, along);
    const int lane = threadIdx.x % 32, g = lane / 4;
    tiles += panel.row_block * along + panel.first_tile;

    panel.for_chunks([&](uint4& chunk, i64, int, int) { chunk = uint4{}; });
    __syncthreads();
    panel.for_m16_tiles([&](int tile, int k_block, int m16) {
        if constexpr (Blocks::GRID) {
            Blocks::for_numbers([&](auto field) {
                const u8* from = reinterpret_cast<const u8*>(&tiles[tile].k_blocks[k_block]);
                scatter_numbers<decltype(field)>(panel, tile, k_block, m16, lane, from);
            });
        } else if constexpr (Blocks::TERNARY) {
            u8* const rows[2] = {panel.row(16 * m16 + g, tile), panel.row(16 * m16 + g + 8, tile)};
            scatter_digits<Blocks>(tiles[tile].k_blocks[k_block], k_block, m16, lane, rows);
        } else {
            u8* const rows[2] = {panel.row(16 * m16 + g, tile), panel.row(16 * m16 + g + 8, tile)};
            typename Format::Codes share = tiles[tile].k_blocks[k_block].codes(m16, lane);
            Format::from_tile(share);
            Blocks::for_codes([&](auto codes) {
                using Codes = decltype(codes);
                scatter_codes<Codes>(Codes::words(share), k_block, lane, rows);
            });
        }
    });
    if constexpr (Blocks::TERNARY) {
        __syncthreads();
        digits_to_bytes<Blocks>(panel);
        __syncthreads();
    }
    if constexpr (Blocks::GRID) {
        Blocks::for_words([&](auto field) { scatter_words<decltype(field)>(panel, tiles); });
    } else {
        Blocks::for_per_block([&](auto field) {
            using Field = decltype(field);
            panel.template for_units<Field>([&](int tile, int offset, u8* byte) {
                set_bits(byte, reinterpret_cast<const u8*>(&tiles[tile].fields)[offset]);
            });
        });
    }
    __syncthreads();

    panel.for_chunks([&](uint4& chunk, i64 index, int begin, int end) {
        if (begin <= 0 && end >= 16) {
            blocks[index] = chunk;
        } else {
            for (int i = begin > 0 ? begin : 0; i < end && i < 16; ++i)
                reinterpret_cast<u8*>(&blocks[index])[i] = reinterpret_cast<const u8*>(&chunk)[i];
        }
    });
}

using PanelOf = PanelConfig<Config>;

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::PanelOf::THREADS)
    unpack(const qgemm::PanelOf::Tile* __restrict__ tiles, uint4* __restrict__ blocks, qgemm::i64 n,
           qgemm::i64 blocks_per_row, qgemm::i64 along) {
    qgemm::unpack<qgemm::PanelOf>(tiles, blocks, n, blocks_per_row, along);
}
