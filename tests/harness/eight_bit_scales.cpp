// Weights as signed bytes on the host, as the lanes of a warpgroup of prefill_sm90_eight_bits compute them.
#include "cta.h"
#include "gemm/eight_bit_scales.cuh"

using namespace qgemm;
using Stages = TileConfig<Config>;
using Format = Stages::TileFormat;
constexpr int K_BLOCKS_PER_STAGE = EIGHT_BIT_COLUMNS / K_BLOCK, K_BLOCKS = Stages::K_BLOCKS;

// The tiles along K; the kernel has them in shared memory.
struct Pipeline {
    const Stages::Tile* tiles;
    const Stages::Tile& tile(int stage, int k_block) const {
        return tiles[(stage * K_BLOCKS_PER_STAGE + k_block) / K_BLOCKS];
    }
    const auto& fields(int stage, int k_block, u32) const { return tile(stage, k_block).fields; }
};

// tiles: of one row_block, along K: k_blocks of whole stages, of which the first `inside` are inside K. codes:
// [64][k_blocks * 64], columns in the order of operand A. units: [stages][64].
extern "C" void eight_bit_scales(const void* tiles, int k_blocks, int inside, signed char* codes, float* units) {
    const Pipeline pipeline = {static_cast<const Stages::Tile*>(tiles)};
    const auto warpgroup = [&] {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = 16 * warp + lane / 4;
        share_table<Format, half, 128>(Format::CODE_EXPONENT);
        EightBitScales<Stages> scales;
        for (int stage = 0; stage < k_blocks / K_BLOCKS_PER_STAGE; ++stage) {
            scales.begin(pipeline, stage, 0, min(inside - stage * K_BLOCKS_PER_STAGE, K_BLOCKS_PER_STAGE), warp, lane);
            units[64 * stage + row] = scales.unit.x, units[64 * stage + row + 8] = scales.unit.y;
            for (int k_block = 0; k_block < K_BLOCKS_PER_STAGE; ++k_block) {
                const int along = stage * K_BLOCKS_PER_STAGE + k_block;
                const auto share = pipeline.tile(stage, k_block).k_blocks[along % K_BLOCKS].codes(warp, lane);
                for (int step = 0; step < Stages::K_BLOCK_STEPS; ++step) {
                    u32 rows[2];
                    scales.bytes(rows, Format::codes_f16(share, step), k_block, step);
                    for (int r = 0; r < 2; ++r)
                        memcpy(codes + (row + 8 * r) * i64(k_blocks) * K_BLOCK + along * K_BLOCK + 16 * step +
                                   4 * (lane % 4),
                               &rows[r], 4);
                }
            }
        }
    };
    Fibers fibers;
    Cta(fibers, {1, 1, 1}, {0, 0, 0}, 128, false, warpgroup);
}
