// prefill_sm80_eight_bits: y [m, n] = x [m, k] @ W [n, k].T by mma.sync, int8 (sm_80 and later) or e4m3 (sm_89 and
// later).
//
//   y[m, n] = sum over groups g of 256 columns:  s_w[n, g] * s_x[m, g] * sum(q_w * q_x)
//
// x is bytes with a scale for each token and group. Weights become bytes in registers, with a scale for each row and
// 256 columns that follows from the scales of the packed format (eight_bit_scales.cuh, e4m3_scales.cuh). A warp owns
// M16_TILES groups of 16 rows, all tokens of the CTA and all columns of a k_iter. Tiles and pipeline: sm80/config.cuh,
// sm80/eight_bits.cuh.
#include "gemm/e4m3_scales.cuh"
#include "gemm/epilogue.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma_e4m3.cuh"
#include "gemm/sm80/eight_bits.cuh"
#include "gemm/sm80/reduce.cuh"
#include "gemm/sum_of.cuh"

namespace qgemm {

// A warp's share of a k_iter.
template <class Config>
struct EightBitWarp {
    static constexpr int M16_TILES = Config::M16_TILES, COLUMN_TILES = Config::COLUMN_TILES;
    static constexpr int STEPS = Config::K_BLOCK_STEPS;
    // sm_90 and sm_100 convert e4m3 operands to halves; unrolled, this would need all registers.
    static constexpr int UNROLLED = Config::E4M3 ? 1 : Config::K_ITER;
    using Format = typename Config::TileFormat;
    using Sums = typename SumOf<Config::E4M3>::Type[M16_TILES][COLUMN_TILES][4];

    const EightBitStage<Config>& stage;
    const StageTiles<Config> tiles;
    const int first_m16, lane;
    EightBitScales<Config, Config::E4M3> scales[M16_TILES];

    // k_blocks: of the stage, inside K.
    __device__ EightBitWarp(const EightBitStage<Config>& stage, int k_blocks, const WarpCoord<Config>& coord)
        : stage(stage),
          tiles{stage.tiles[coord.first_m16 / WARPS]},
          first_m16(coord.first_m16 % WARPS),
          lane(coord.lane) {
#pragma unroll
        for (int m16 = 0; m16 < M16_TILES; ++m16) scales[m16].begin(tiles, 0, 0, k_blocks, first_m16 + m16, lane);
    }
    // acc += W @ x over the stage.
    __device__ __forceinline__ void multiply(typename Config::WarpAcc& acc) const {
        Sums sums = {};
#pragma unroll UNROLLED
        for (int k_block = 0; k_block < Config::K_ITER; ++k_block) add_k_block(sums, k_block);
        add_scaled(acc, sums);
    }

private:
    __device__ __forceinline__ void add_k_block(Sums& sums, int k_block) const {
        Bytes a[M16_TILES][STEPS];
#pragma unroll
        for (int m16 = 0; m16 < M16_TILES; ++m16) {
            const auto codes = tiles.codes(k_block).codes(first_m16 + m16, lane);
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
                scales[m16].bytes(a[m16][step].row, Format::codes_f16(codes, step), k_block, step);
        }
        const u32 x = shared_address(stage.x[lane % 8]) + k_block * K_BLOCK + lane / 8 * 16;
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; ++tile) {
            u32 b[4];  // token g, a word for each step
            ldmatrix_x4(b, x + 8 * tile * Config::X_ROW_BYTES);
#pragma unroll
            for (int m16 = 0; m16 < M16_TILES; ++m16)
#pragma unroll
                for (int step = 0; step < STEPS; step += 2)
                    mma_m16n8k32(sums[m16][tile], a[m16][step], a[m16][step + 1], uint2{b[step], b[step + 1]});
        }
    }
    // The scales of tokens 2t, 2t + 1, 2t + 8 and 2t + 9 are adjacent.
    __device__ __forceinline__ void add_scaled(typename Config::WarpAcc& acc, const Sums& sums) const {
        const float4* lane_scales = reinterpret_cast<const float4*>(stage.x_scales) + lane % 4;
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; ++tile) {
            const float4 four = lane_scales[tile / 2 * 4];
            const float x[2] = {tile % 2 ? four.z : four.x, tile % 2 ? four.w : four.y};
#pragma unroll
            for (int m16 = 0; m16 < M16_TILES; ++m16)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float scale = x[j % 2] * (j < 2 ? scales[m16].unit.x : scales[m16].unit.y);
                    float& sum = acc[m16][tile].sum[j];
                    sum = __fmaf_rn(float(sums[m16][tile][j]), scale, sum);
                }
        }
    }
};

using Prefill = Sm80EightBits<Config>;

}  // namespace qgemm

// x: codes [x_rows, columns], then scales [groups along K][x_rows]: qgemm/cuda/layout/group_activations.py.
extern "C" __global__ void __launch_bounds__(qgemm::Prefill::THREADS, 1)
    prefill_sm80_eight_bits(const qgemm::Prefill::Tile* __restrict__ tiles, const signed char* __restrict__ x,
                            const __grid_constant__ qgemm::Epilogue epilogue, float4* partials, qgemm::u32* counters,
                            qgemm::i64 n, qgemm::i64 k, int m, int x_rows, int split_k) {
    using namespace qgemm;
    using Format = Prefill::TileFormat;
    extern __shared__ __align__(128) unsigned char memory[];
    const Smem<Prefill, EightBitStage<Prefill>> smem{memory};
    auto& stages = smem.stages();
    const WarpCoord<Prefill> coord;
    const CtaTile<Prefill> p(n, k, m, split_k);
    TileLoader<Prefill> w_loader(stages[0].tiles, tiles, p);
    EightBitXLoader<Prefill> x_loader(stages[0], x, x_rows, p);
    fill_stages(w_loader, x_loader, sizeof(stages[0]),
                [] { share_table<Format, half, Prefill::THREADS>(Format::CODE_EXPONENT); });

    Prefill::WarpAcc acc = {};
    for_stages(stages, w_loader, x_loader, p, [&](const EightBitStage<Prefill>& stage, int k_iter) {
        const int k_blocks = min(p.k_blocks - k_iter * Prefill::K_ITER, Prefill::K_ITER);
        EightBitWarp<Prefill>(stage, k_blocks, coord).multiply(acc);
    });
    if (split_k > 1 && !SplitKReduction<Prefill>{partials, counters, split_k}.reduce(acc, p)) return;
    reduce<Prefill::ROWS>(acc, smem.reduce(), p, coord, [&](int token, int row, auto total) {
        epilogue.store((p.first_token + token) * p.n, p.first_row + row, total(row));
    });
}
