// Mainloop of decode for float activations (W4A16). Codes are not dequantized: scales multiply float accumulators, one
// group at a time, and a product of x with a constant gives sum(x) for the zero or the minimum.
//
// Config: Decode of config.cuh.
#pragma once

#include "policies.cuh"
#include "ptx/cluster.cuh"
#include "ptx/vote_ballot.cuh"
#include "reduce.cuh"
#include "scales.cuh"
#include "x_loader.cuh"

namespace qgemm {

// The power of two that multiplies each token of x for operands with an X_EXPONENT. Numbers of 2^(128 - X_EXPONENT) or
// more become infinite by it, and then so do the token's sums: the warp starts again, without a factor for that token.
template <class Config, int X_EXPONENT>
struct XRange {
    static constexpr int N8_TILES = Config::N8_TILES;
    static constexpr u32 ONES = 0x3f803f80, FACTORS = ONES + (X_EXPONENT << 7) * 0x00010001;  // two numbers in bf16
    static constexpr u32 QUADS = 0x11111111;  // lanes of one t, which hold the sums of a token
    u32 factors[N8_TILES];                    // the factor of token g
    bool started_again = false;

    __device__ XRange() {
        for (u32& factor : factors) factor = FACTORS;
    }
    __device__ void scale(u32& pair, int n8) const {
        if constexpr (X_EXPONENT != 0) pair = bits_of(__hmul2(as_bf162(pair), as_bf162(factors[n8])));
    }
    // Whether the warp has to start again for sums of its m tokens; else all sums are as with the factor.
    __device__ bool left(typename Config::WarpAcc& acc, int m, int lane) {
        if constexpr (X_EXPONENT == 0) return false;
        const int g = lane / 4, t = lane % 4;
        bool restart = false;
#pragma unroll
        for (int n8 = 0; n8 < N8_TILES; ++n8)
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                float zero = 0;  // NaN after a sum that is not finite
                if (Config::TOKENS == 1 || 8 * n8 + 2 * t + odd < m)
                    for_all(acc, n8, odd, [&](float& sum) { zero += 0 * sum; });
                const u32 infinite = vote_ballot(zero != 0) & QUADS << g / 2;
                if (infinite && g % 2 == odd && factors[n8] != ONES) factors[n8] = ONES, restart = true;
            }
        if (vote_ballot(restart)) return started_again = true;
        if (started_again)
#pragma unroll
            for (int n8 = 0; n8 < N8_TILES; ++n8)
#pragma unroll
                for (int odd = 0; odd < 2; ++odd)
                    if (__shfl_sync(~0u, factors[n8], 4 * (2 * t + odd)) == ONES)
                        for_all(acc, n8, odd, [](float& sum) { sum *= two_to(X_EXPONENT); });
        return false;
    }

private:
    // function(sum) for a lane's sums of token 2t + odd of a group of eight.
    template <class Function>
    static __device__ void for_all(typename Config::WarpAcc& acc, int n8, int odd, Function function) {
#pragma unroll
        for (int m16 = 0; m16 < Config::ROW_BLOCKS * Config::M16_TILES; ++m16)
#pragma unroll
            for (int row = 0; row < 2; ++row)
                function(acc[m16 / Config::M16_TILES][m16 % Config::M16_TILES][n8].sum[2 * row + odd]);
    }
};

template <class WarpAcc>
__device__ inline void clear(WarpAcc& acc) {
#pragma unroll
    for (auto& row_block : acc)
#pragma unroll
        for (auto& m16 : row_block)
#pragma unroll
            for (Acc& n8 : m16) n8 = {};
}

// acc += W @ x for stage number i of the warp, without the minimums of super-blocks.
template <class Config, class Range>
__device__ inline void multiply(typename Config::WarpAcc& acc, XSums<Config>& x_sums, const Range& x_range,
                                const WarpSmem<Config, XRows<Config>>& smem, int i, int stage, int lane) {
    using Format = typename Config::Fields;
    using In = typename Config::In;
    using B = Operand<Format, In>;
    constexpr int N8_TILES = Config::N8_TILES, STEPS = Config::STAGE_STEPS, K_BLOCK_STEPS = Config::K_BLOCK_STEPS;
    constexpr int SCALES = Config::STAGE_SCALES, SCALE_STEPS = STEPS / SCALES;
    constexpr bool ZEROED = B::ZERO != 0, SHARED_MINIMUM = Config::SHARED_MINIMUM;
    static_assert(!(Format::HAS_MINIMUM && Format::CODE_BIAS), "a format has a zero or a minimum");

    const int g = lane / 4, k_block = Config::WHOLE_TILES ? 0 : i % Config::K_BLOCKS;  // first of the stage
    const XRows<Config>& x = smem.pipeline.stages[stage].x;
    XStep<B::TERMS> b[N8_TILES][STEPS / 2][2];
#pragma unroll
    for (int n8 = 0; n8 < N8_TILES; ++n8)
#pragma unroll
        for (int pair = 0; pair < STEPS / 2; ++pair) {
            load_x_steps<Format::OWNS_COLUMNS>(b[n8][pair], &x[8 * n8][32 * pair],
                                               Config::TOKEN_STRIDE * (Config::STAGE_COLUMNS + 8), lane);
#pragma unroll
            for (int j = 0; j < 4; ++j) x_range.scale(b[n8][pair][j / 2][0][j % 2], n8);
        }
    const auto multiply_step = [&](Acc& sum, const Fragment& a, int n8, int step) {
#pragma unroll
        for (int term = 0; term < B::TERMS; ++term)
            mma_m16n8k16<typename B::Type>(sum, a, b[n8][step / 2][step % 2][term]);
    };
    // For each scale, in units of the codes: -zero * sum(x), the start value of a dot product, or sum(x) for the
    // minimum.
    Acc starts[SCALES][N8_TILES] = {};
    if constexpr (Format::HAS_MINIMUM || ZEROED) {
        // Two independent chains of mma hide the latency of a step.
        constexpr int CHAIN = SCALE_STEPS > K_BLOCK_STEPS ? SCALE_STEPS / 2 : SCALE_STEPS;
        const Fragment constant = B::constant(Format::HAS_MINIMUM ? 1 : -B::ZERO);
        Acc chains[STEPS / CHAIN][N8_TILES] = {};
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int n8 = 0; n8 < N8_TILES; ++n8) multiply_step(chains[step / CHAIN][n8], constant, n8, step);
#pragma unroll
        for (int chain = 0; chain < STEPS / CHAIN; ++chain)
#pragma unroll
            for (int n8 = 0; n8 < N8_TILES; ++n8)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float& start = starts[chain * CHAIN / SCALE_STEPS][n8].sum[j];
                    start = chain * CHAIN % SCALE_STEPS ? start + chains[chain][n8].sum[j] : chains[chain][n8].sum[j];
                }
    }
    if constexpr (SHARED_MINIMUM)
        x_sums.move(k_block, lane, [&](int n8, int scale) -> float2 {
            const float (&sum)[4] = starts[scale][n8].sum;
            return {sum[0] * B::SUM_FACTOR, sum[1] * B::SUM_FACTOR};
        });
#pragma unroll
    for (int m16 = 0; m16 < Config::ROW_BLOCKS * Config::M16_TILES; ++m16) {
        const int row_block = m16 / Config::M16_TILES, m16_in_block = m16 % Config::M16_TILES;
        const Format& fields = smem.pipeline.fields(i, stage, row_block);
        decltype(decode_codes<Format>(smem.pipeline.codes(stage, row_block), m16_in_block,
                                      lane)) codes[STEPS / K_BLOCK_STEPS];
#pragma unroll
        for (int j = 0; j < Config::STAGE_K_BLOCKS; ++j)
            codes[j] = decode_codes<Format>(smem.pipeline.codes(stage, row_block, j), m16_in_block, lane);
        alignas(16) StageScales<Config> scales;
        smem.load(scales, fields, row_block, m16_in_block, g, k_block);
#pragma unroll
        for (int scale = 0; scale < SCALES; ++scale) {
            Acc dots[N8_TILES] = {};
            if constexpr (ZEROED)
#pragma unroll
                for (int n8 = 0; n8 < N8_TILES; ++n8) dots[n8] = starts[scale][n8];
#pragma unroll
            for (int step = scale * SCALE_STEPS; step < (scale + 1) * SCALE_STEPS; ++step) {
                const Fragment a = B::weights(codes[step / K_BLOCK_STEPS], step % K_BLOCK_STEPS);
#pragma unroll
                for (int n8 = 0; n8 < N8_TILES; ++n8) multiply_step(dots[n8], a, n8, step);
            }
            const int index = Config::scale_index(k_block, scale * SCALE_STEPS);
            const float2 d = scales[scale];
            const float2 m = SHARED_MINIMUM ? float2{} : fields.minimum(m16_in_block, g, index);
#pragma unroll
            for (int n8 = 0; n8 < N8_TILES; ++n8)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float& sum = acc[row_block][m16_in_block][n8].sum[j];
                    sum += (j < 2 ? d.x : d.y) * dots[n8].sum[j];
                    if constexpr (Format::HAS_MINIMUM && !SHARED_MINIMUM)
                        sum += (j < 2 ? m.x : m.y) * starts[scale][n8].sum[j];
                }
        }
    }
}

struct MainloopA16 {
    // The work of a CTA. x: m rows. mbarriers: one for each stage of a warp. store: see reduce_and_store; store.begin()
    // runs while the first weights are in flight.
    template <class Config, class Coord, class Store>
    static __device__ __forceinline__ void run(const Coord& coord, const typename Config::In* x, int m,
                                               unsigned char* memory,
                                               unsigned long long (&mbarriers)[Config::WARP_SPLIT_K][Config::STAGES],
                                               Store store) {
        using Format = typename Config::Fields;
        using B = Operand<Format, typename Config::In>;
        using Smem = WarpSmem<Config, XRows<Config>>;
        static_assert(sizeof(Smem) == Config::WARP_BYTES, "shared memory of a warp differs from the host's");
        if constexpr (Config::CLUSTER_SPLIT_K > 1) barrier_cluster_arrive();  // peers may store to this CTA's inbox
        auto* smem = reinterpret_cast<Smem*>(memory + Config::INBOX_BYTES + Format::TABLE_BYTES) + coord.warp_k;
        auto& pipeline = smem->pipeline;
        using Stage = typename decltype(smem->pipeline)::Stage;
        typename Config::WarpAcc acc;
        XRange<Config, B::X_EXPONENT> x_range;
        for (;;) {
            KTileIterator<Config> k_tiles = {coord};
            XLoader<Config, Stage> x_loader(x, coord.products.k, m, coord, pipeline.stages);
            const StageBarriers<Config::STAGES, true, Config::BULK> barriers(mbarriers[coord.warp_k]);
            XSums<Config> x_sums = {};
            clear(acc);
            main_loop<Config::STAGES, Coord::X_FIRST>(
                coord.count, barriers,
                [&](int stage) {
                    barriers.first_copy(stage, pipeline.bytes(k_tiles),
                                        [&](auto copy) { pipeline.load(k_tiles, stage, copy); });
                    k_tiles.advance();
                },
                [&] {
                    share_table<Format, typename B::Type, Config::THREADS>(B::EXPONENT);
                    prefetch_w<Config>(pipeline, k_tiles);
                    store.begin();
                },
                [] {}, [&](int stage) { x_loader.load(stage); },
                [&](int i, int stage) {
                    multiply_stage<Config, 3>(
                        acc, x_sums, *smem, i, stage, {1 / B::SUM_FACTOR, (1 << B::SHIFT) / B::SUM_FACTOR}, coord.lane,
                        [&] { multiply<Config>(acc, x_sums, x_range, *smem, i, stage, coord.lane); });
                });
            if (!x_range.left(acc, m, coord.lane)) break;
            barriers.end(coord.count);
        }
        __syncthreads();                         // every warp has read its stages: the reduction aliases them
        const float unit = two_to(B::EXPONENT);  // value of a code
        reduce_and_store<Config>(acc, {unit, unit / (1 << B::SHIFT)}, memory, coord, m, store);
    }
};

}  // namespace qgemm
