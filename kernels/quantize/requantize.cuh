// A warp converts 16 rows by EIGHT_BIT_COLUMNS of W to bytes: packed tiles in global memory -> boxes of 128 columns in
// shared memory, in the swizzle that wgmma reads. Used by requantize.cu and by the requantizer warps of gemm_sm90_s8.
#pragma once

#include "gemm/e4m3_scales.cuh"
#include "ptx/shared_address.cuh"
#include "ptx/stmatrix.cuh"

namespace qgemm {

// Config, in which a format with a struct WithoutTable is replaced by it: it computes levels without a table.
template <class Format, class = void>
struct Tableless {
    using Type = Format;
};
template <class Format>
struct Tableless<Format, decltype(void(sizeof(typename Format::WithoutTable)))> {
    using Type = typename Format::WithoutTable;
};
template <class Base>
struct RequantizeConfig : Base {
    template <int M16_TILES>
    using Format = typename Tableless<typename Base::template Format<M16_TILES>>::Type;
};

constexpr int BOX_COLUMNS = 128, BOX_K_BLOCKS = BOX_COLUMNS / K_BLOCK;
constexpr int STAGE_K_BLOCKS = EIGHT_BIT_COLUMNS / K_BLOCK, STAGE_BOXES = STAGE_K_BLOCKS / BOX_K_BLOCKS;

// The tiles of a row_block in a stage of EIGHT_BIT_COLUMNS; tiles from `count` on are beyond K.
template <class TileOf>
struct StageTiles {
    using Tile = typename TileOf::Tile;
    static constexpr int TILES = STAGE_K_BLOCKS / TileOf::K_BLOCKS;
    const Tile* tiles;
    int count;

    // Offsets have 32 bits, except the first one.
    __device__ StageTiles(const Tile* w, u32 row_block, u32 stage, u32 tiles_along_k)
        : tiles(w + (row_block * tiles_along_k + stage * TILES)),
          count(int(min(u32(TILES), tiles_along_k - stage * TILES))) {}
    __device__ int k_blocks() const { return TILES == 1 ? STAGE_K_BLOCKS : count * TileOf::K_BLOCKS; }
    __device__ const Tile& tile(u32 k_block) const {
        if (TILES == 1) return *tiles;
        const u32 bytes = min(k_block / TileOf::K_BLOCKS * u32(sizeof(Tile)), (count - 1) * u32(sizeof(Tile)));
        return *reinterpret_cast<const Tile*>(reinterpret_cast<const char*>(tiles) + bytes);
    }
    __device__ const auto& fields(int, int k_block, u32) const { return tile(k_block).fields; }
    __device__ auto codes(u32 k_block, u32 m16, u32 lane) const {
        return tile(k_block).k_blocks[k_block % TileOf::K_BLOCKS].codes(m16, lane);
    }
};

// Address of a lane's stmatrix of steps 0 and 1 in 16 rows of a box at address `rows`. The 16-byte chunk c of row r is
// at c ^ (r % 8), so the addresses of other steps differ by an exclusive or.
__device__ inline u32 swizzled_row(u32 rows, int lane) {
    return rows + (lane / 8 % 2 * 8 + lane % 8) * BOX_COLUMNS + (lane / 16 ^ lane % 8) * 16;
}

// Stores the bytes of a k_block of the stage to shared memory. row: the lane's swizzled_row(); BOX_BYTES: from box to
// box. k_blocks beyond K may have any bytes, because x has zeros there.
template <int BOX_BYTES, class TileOf, bool E4M3>
__device__ __forceinline__ void stage_bytes(u32 row, const EightBitScales<TileOf, E4M3>& scales,
                                            const typename TileOf::TileFormat::Codes& codes, int k_block) {
    constexpr int STEPS = TileOf::K_BLOCK_STEPS;
#pragma unroll
    for (int step = 0; step < STEPS; step += 2) {
        u32 bytes[4];  // rows g and g + 8 of a step, then of the next
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 rows[2];
            scales.bytes(rows, TileOf::TileFormat::codes_f16(codes, step + i), k_block, step + i);
            bytes[2 * i] = rows[0], bytes[2 * i + 1] = rows[1];
        }
        stmatrix_x4((row ^ (k_block % BOX_K_BLOCKS * STEPS + step) * 16) + k_block / BOX_K_BLOCKS * BOX_BYTES, bytes);
    }
}

}  // namespace qgemm
