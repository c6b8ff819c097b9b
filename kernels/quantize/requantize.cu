// requantize: packed tiles of W -> signed bytes or e4m3 floats, with a scale for each row and EIGHT_BIT_COLUMNS, the
// operand of gemm_sm90_s8.
//
//   codes   for each pair of row_blocks and EIGHT_BIT_COLUMNS: [row_block][box of 128 columns][64 rows][128 bytes]. The
//           16-byte chunk c of row r is at c ^ (r % 8), the 128-byte swizzle. In 16 columns, those of lane t are
//           adjacent: 2t, 2t + 1, 2t + 8, 2t + 9.
//   scales  in the same order, [row_block][64 rows]
//
// The bytes are equal to those that prefill_sm90_eight_bits computes in registers. A CTA owns ROW_BLOCKS row_blocks. A
// warp owns 16 rows and stages them in shared memory, so that global stores are 16 bytes wide. The kernel does not wait
// for the kernels before it: W never changes, and gemm_sm90_s8 lets no kernel start before it has read the old bytes.
// Config: TileConfig with E4M3 (0, 1), LEAST_LEVEL and GREATEST_LEVEL of the format, ROW_BLOCKS.
#include "ptx/dynamic_smem.cuh"
#include "ptx/griddepcontrol.cuh"
#include "quantize/requantize.cuh"

namespace qgemm {

using TileOf = TileConfig<RequantizeConfig<Config>>;
constexpr int CTA_WARPS = Config::ROW_BLOCKS * WARPS;
constexpr int MIN_CTAS = Config::ROW_BLOCKS == 1 ? 9 : 1;  // per SM: 56 registers, with which no format spills
using Box = signed char[TILE_ROWS][BOX_COLUMNS];

}  // namespace qgemm

// tiles: from the first of the rows on. stages: of EIGHT_BIT_COLUMNS along K, which CTAs of a row go through in turn.
// row_blocks: of W; pairs: of row_blocks that there is room for.
extern "C" __global__ void __launch_bounds__(qgemm::CTA_WARPS * 32, qgemm::MIN_CTAS)
    requantize(const qgemm::TileOf::Tile* __restrict__ tiles, signed char* __restrict__ codes, int tiles_along_k,
               int stages, int row_blocks, int pairs) {
    using namespace qgemm;
    using Format = TileOf::TileFormat;
    constexpr int STAGE_BYTES = STAGE_BOXES * sizeof(Box);
    constexpr int WARP_CHUNKS = 16 * BOX_COLUMNS / 16, BOX_CHUNKS = sizeof(Box) / 16;
    griddepcontrol_launch_dependents();
    share_table<Format, half, CTA_WARPS * 32>(Format::CODE_EXPONENT);
    const int warp = threadIdx.x / 32 % WARPS, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int cta_row_block = threadIdx.x / 32 / WARPS;
    const i64 row_block = blockIdx.y * i64(Config::ROW_BLOCKS) + cta_row_block;
    Box* staged = reinterpret_cast<Box*>(dynamic_smem() + Format::TABLE_BYTES) + cta_row_block * STAGE_BOXES;
    const u32 row = swizzled_row(shared_address(staged[0][16 * warp]), lane);
    for (int stage = blockIdx.x; stage < stages && row_block < row_blocks; stage += gridDim.x) {
        const StageTiles<TileOf> from(tiles, row_block, stage, tiles_along_k);
        Format::Codes words[STAGE_K_BLOCKS];
#pragma unroll
        for (int k_block = 0; k_block < STAGE_K_BLOCKS; ++k_block) words[k_block] = from.codes(k_block, warp, lane);
        EightBitScales<TileOf, Config::E4M3> scales;
        scales.begin(from, 0, 0, from.k_blocks(), warp, lane);
        __syncwarp();  // the previous stage is read
#pragma unroll
        for (int k_block = 0; k_block < STAGE_K_BLOCKS; ++k_block)
            stage_bytes<sizeof(Box)>(row, scales, words[k_block], k_block);
        __syncwarp();
        const i64 number = (row_block / 2 * stages + stage) * 2 + row_block % 2;
        uint4* to = reinterpret_cast<uint4*>(codes + number * STAGE_BYTES) + warp * WARP_CHUNKS;
#pragma unroll
        for (int box = 0; box < STAGE_BOXES; ++box)
#pragma unroll
            for (int i = lane; i < WARP_CHUNKS; i += 32)
                to[box * BOX_CHUNKS + i] = reinterpret_cast<const uint4*>(staged[box][16 * warp])[i];
        float* unit = reinterpret_cast<float*>(codes + i64(pairs) * 2 * stages * STAGE_BYTES) + number * TILE_ROWS;
        if (t == 0) unit[16 * warp + g] = scales.unit.x, unit[16 * warp + g + 8] = scales.unit.y;
    }
    griddepcontrol_wait();  // a kernel that waits for this one also waits for the kernels before it
}
