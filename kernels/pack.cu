// pack: blocks [n, blocks_per_row] as they lie in a file -> tiles [row_blocks, along], and for each row of the
// row_blocks a bound of the magnitude of its finite weights and of the factors of their scales.
//
// The panel is copied into shared memory. A warp gathers the words of a k_block of a group of 16 rows; the fields per
// block are gathered in shared memory, where bounds are taken from them. What is beyond the matrix is zero.
// Template: Format, TILES, THREADS.
#include "panel.cuh"

// 16 bytes, of which the first `bytes` come from memory and the others are zero; there when wait_copies() returns.
__device__ inline void copy_chunk(uint4& to, const uint4* from, int bytes) {
#if __CUDA_ARCH__ >= 800
    const u32 at = __cvta_generic_to_shared(&to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
#else
    to = bytes > 0 ? *from : uint4{};
    for (int i = bytes; i < 16; ++i) reinterpret_cast<u8*>(&to)[i] = 0;
#endif
}

__device__ inline void wait_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// A lane's words of a k_block, from rows g and g + 8 of the k_block's tile.
template <class Codes>
__device__ void gather_codes(const u8* const (&rows)[2], int k_block, int lane, u32 (&words)[Codes::BITS]) {
    const int base = Codes::base(k_block, lane % 4), first = base / 8, shift = base % 8;
    for_codes<Codes>([&](const BitPosition& position, int r, int bit) {
        const u32 code = rows[r][first + bit / 8] >> shift >> bit % 8 & Codes::MASK;
        words[position.word] |= code << position.bit;
    });
}

// Those words -> a k_block in memory.
template <class Codes>
__device__ void put_codes(const u32 (&words)[Codes::BITS], int m16, int lane, void* to) {
#pragma unroll
    for (int word = 0; word < Codes::BITS; word += Codes::LOAD_WORDS)
        load_words<Codes::LOAD_WORDS>(static_cast<u32*>(to) + Codes::LOAD_WORDS * chunk_index<Codes>(m16, lane, word),
                                      &words[word]);
}

extern "C" __global__ void __launch_bounds__(THREADS) pack(const uint4* __restrict__ blocks, Tile* __restrict__ tiles,
                                                           u32* row_absmax, i64 n, i64 blocks_per_row, i64 along) {
    __shared__ uint4 staged[TILE_ROWS * ROW_CHUNKS];
    __shared__ Format fields[TILES];
    const Panel panel(staged, n, blocks_per_row, along);
    const int lane = threadIdx.x % 32, g = lane / 4;
    tiles += panel.row_block * along + panel.first_tile;

    panel.for_chunks([&](uint4& chunk, i64 index, int begin, int end) {
        copy_chunk(chunk, blocks + (end > 0 ? index : 0), end < 0 ? 0 : end < 16 ? end : 16);
    });
    wait_copies();
    __syncthreads();

    panel.for_m16_tiles([&](int tile, int k_block, int m16) {
        const u8* const rows[2] = {panel.row(16 * m16 + g, tile), panel.row(16 * m16 + g + 8, tile)};
        u8* to = reinterpret_cast<u8*>(&tiles[tile].k_blocks[k_block]);
        Format::Codes share = {};
        for_codes([&](auto codes) {
            using Codes = decltype(codes);
            gather_codes<Codes>(rows, k_block, lane, Codes::words(share));
        });
        Format::to_tile(share);
        for_codes([&](auto codes) {
            using Codes = decltype(codes);
            put_codes<Codes>(Codes::words(share), m16, lane, to + Codes::TO);
        });
    });
    for_per_block([&](auto field) {
        using Field = decltype(field);
        panel.for_units<Field>(
            [&](int tile, int at, const u8* byte) { reinterpret_cast<u8*>(&fields[tile])[at] = *byte; });
    });
    __syncthreads();

    constexpr int CHUNKS = sizeof(Format) / 16;
    for (int i = threadIdx.x; i < panel.tiles * CHUNKS; i += THREADS)
        reinterpret_cast<uint4*>(&tiles[i / CHUNKS].fields)[i % CHUNKS] = reinterpret_cast<const uint4*>(fields)[i];

    // Of the rows of this thread, the same in every turn. Floats that are not negative compare like their bits.
    static_assert(THREADS % 32 == 0, "a turn is whole tiles of rows");
    const int m16 = lane / 8, row = lane % 8;
    u32 most[2] = {};
    const auto count = [&](float2 scale, float2 minimum) {
        const float of[2] = {__fadd_rn(__fmul_rn(Format::LARGEST_CODE, fabsf(scale.x)), fabsf(minimum.x)),
                             __fadd_rn(__fmul_rn(Format::LARGEST_CODE, fabsf(scale.y)), fabsf(minimum.y))};
#pragma unroll
        for (int r = 0; r < 2; ++r)  // neither infinity nor NaN
            if (__float_as_uint(of[r]) < 0x7f800000) most[r] = max(most[r], __float_as_uint(of[r]));
    };
    const int groups = panel.bytes / BLOCK_BYTES * (BLOCK_WEIGHTS / Format::GROUP_SIZE);  // that share a scale
    for (int i = threadIdx.x / 32; i < groups; i += THREADS / 32) {
        constexpr int IN_TILE = K_BLOCKS * K_BLOCK_SCALES;
        const Format& of = fields[i / IN_TILE];
        count(of.scale(m16, row, i % IN_TILE), of.minimum(m16, row, i % IN_TILE));
        // Factors may be larger than their products with an integer, which may be 0.
        [&](const auto& of) {
            if constexpr (Format::SCALE_FACTORS == 2)
                count(__half22float2(of.half_scale(m16, row, i % IN_TILE)),
                      __half22float2(of.half_minimum(m16, row, i % IN_TILE)));
        }(of);
    }
    row_absmax += panel.row_block * TILE_ROWS + 16 * m16 + row;
#pragma unroll
    for (int r = 0; r < 2; ++r)  // few are larger than what was seen
        if (panel.holds(16 * m16 + row + 8 * r) && most[r] > row_absmax[8 * r]) atomicMax(&row_absmax[8 * r], most[r]);
}
