// Operand A of prefill_sm90 on the host: the weights of a tile as every lane computes them from codes, scales and
// minimums, in half, each row multiplied by a power of two.
#include "gemm/row_exponent.cuh"
#include "tile_config.cuh"

using namespace qgemm;
using Operand = TileConfig<Config>;
using Format = Operand::TileFormat;

// weights: [k_block][group of 16 rows][lane][step][register 0..3][2]; exponents: [64], rows are multiplied by
// 2^-exponent.
extern "C" void operand_a(const Operand::Tile& tile, const float* row_absmax, u32* weights, int* exponents) {
    constexpr int LANES = 32;
    if constexpr (Format::TABLE_BYTES > 0)
        for (threadIdx.x = 0; threadIdx.x < LANES; ++threadIdx.x)
            fill_table<Format, half, LANES>(Format::CODE_EXPONENT);
    const Levels<Operand> levels;
    for (int k_block = 0; k_block < Operand::K_BLOCKS; ++k_block)
        for (int m16 = 0; m16 < WARPS; ++m16)
            for (int lane = 0; lane < LANES; ++lane) {
                threadIdx = {unsigned(lane), 0, 0};
                const int g = lane / 4, row = 16 * m16 + g;
                const RowExponent<Operand> exponent(float2{row_absmax[row], row_absmax[row + 8]});
                exponents[row] = exponent.weight[0], exponents[row + 8] = exponent.weight[1];
                const ScaleLoader<Operand> load(exponent);
                const auto codes = tile.k_blocks[k_block].codes(m16, lane);
                for (int step = 0; step < Operand::K_BLOCK_STEPS; ++step) {
                    ScaleOf<Operand> group = load(tile.fields, m16, g, Operand::scale_index(k_block, step));
                    fold_zero<Operand>(group);
                    const Fragment codes_f16 = Format::codes_f16(codes, step);
                    for (int i = 0; i < 4; ++i)
                        *weights++ = group.weights(levels.from_codes(codes_f16.a[i], i % 2), i % 2);
                }
            }
}
