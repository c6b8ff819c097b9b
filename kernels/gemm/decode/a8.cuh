// Mainloop of decode for integer activations (W4A8 and the like): dot products of codes on tensor cores, as integers or
// halves (gemm/dots.cuh).
//
// x is Activations [k_blocks][m], which arrive with the stages of W, or, if it is small, numbers [m, k] that each CTA
// quantizes for itself.
// Config: Decode of config.cuh.
#pragma once

#include "codes/quantize.cuh"
#include "gemm/dots.cuh"
#include "policies.cuh"
#include "reduce.cuh"
#include "scales.cuh"

namespace qgemm {

template <class Config>
using XBlocks = Activations[8 * Config::N8_TILES];

// x in a stage: all tokens of a k_block if x comes as Activations, void otherwise.
template <class Config, class In>
struct StageX {
    using Type = void;
};
template <class Config>
struct StageX<Config, Activations> {
    using Type = XBlocks<Config>;
};

// A lane's share of a block of x: the same columns as the lane's codes of decode_codes.
template <class Dots>
__device__ inline typename Dots::X load_x(const signed char* q, int t) {
    if constexpr (Dots::Format::OWNS_COLUMNS)
        return Dots::owned_x(q, t);
    else
        return Dots::x(*reinterpret_cast<const uint2*>(q + 8 * t));
}

// acc += W @ x for k_block number i of the warp, without the minimums of super-blocks. x: of this k_block.
template <class Config, class Smem>
__device__ inline void multiply(typename Config::WarpAcc& acc, XSums<Config>& x_sums, const Smem& smem,
                                const Activations* x, int i, int stage, int lane) {
    using Format = typename Config::Fields;
    using Dots = FewDots<Format>;
    constexpr int N8_TILES = Config::N8_TILES, TOKEN_STRIDE = Config::TOKEN_STRIDE;
    constexpr bool SHARED_MINIMUM = Config::SHARED_MINIMUM;
    static_assert(Config::STAGE_K_BLOCKS == 1, "x comes by k_blocks");
    const int g = lane / 4, t = lane % 4, k_block = i % Config::K_BLOCKS;
    typename Dots::X b[BLOCKS][N8_TILES];
    float da[BLOCKS][N8_TILES][2], sa[BLOCKS][N8_TILES][2];  // tokens 2t and 2t + 1
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
        for (int n8 = 0; n8 < N8_TILES; ++n8) {
            b[block][n8] = load_x<Dots>(x[TOKEN_STRIDE * (8 * n8 + g)].q + 32 * block, t);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float2 ds = x[TOKEN_STRIDE * (8 * n8 + 2 * t + j)].ds[block];
                da[block][n8][j] = ds.x, sa[block][n8][j] = ds.y;
            }
        }
    if constexpr (SHARED_MINIMUM && BLOCK_SCALES<Format> > 1) {
        x_sums.move(k_block, lane,
                    [&](int n8, int group) { return half_block_sums(b[group / 2][n8], group % 2, da[group / 2][n8]); });
    } else if (SHARED_MINIMUM && t == k_block) {
#pragma unroll
        for (int n8 = 0; n8 < N8_TILES; ++n8) {
            const float2(&ds)[BLOCKS] = x[TOKEN_STRIDE * (8 * n8 + g)].ds;
            x_sums.sums[n8][0] = {ds[0].y, ds[BLOCKS - 1].y};
        }
    }
    float x_sum[N8_TILES][2] = {};  // sum of sa over the blocks
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
        for (int n8 = 0; n8 < N8_TILES; ++n8)
#pragma unroll
            for (int j = 0; j < 2; ++j) x_sum[n8][j] += sa[block][n8][j];
#pragma unroll
    for (int m16 = 0; m16 < Config::ROW_BLOCKS * Config::M16_TILES; ++m16) {
        const int row_block = m16 / Config::M16_TILES, m16_in_block = m16 % Config::M16_TILES;
        const Format& fields = smem.pipeline.fields(i, stage, row_block);
        const auto codes = decode_codes<Format>(smem.pipeline.codes(stage, row_block), m16_in_block, lane);
        alignas(16) StageScales<Config> scales;
        smem.load(scales, fields, row_block, m16_in_block, g, k_block);
        if constexpr (WIDE_GROUPS<Format> && !SHARED_MINIMUM) {
            typename Dots::Step steps[2 * BLOCKS];
#pragma unroll
            for (int step = 0; step < 2 * BLOCKS; ++step) steps[step] = Dots::step(codes, step);
            const float2 mw = fields.minimum(m16_in_block, g, Config::scale_index(k_block, 0));
#pragma unroll
            for (int n8 = 0; n8 < N8_TILES; ++n8)
                add_blocks<Dots, Format::HAS_MINIMUM>(acc[row_block][m16_in_block][n8], steps, scales[0], mw, b, da,
                                                      x_sum[n8], n8);
            continue;
        }
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            const auto first = Dots::step(codes, 2 * block), second = Dots::step(codes, 2 * block + 1);
#pragma unroll
            for (int part = 0; part < BLOCK_SCALES<Format>; ++part) {
                const int index = Config::scale_index(k_block, 2 * block + part);
                const float2 dw = scales[(2 * block + part) / Config::SCALE_STEPS % Config::K_BLOCK_SCALES];
                const float2 mw = SHARED_MINIMUM ? float2{} : fields.minimum(m16_in_block, g, index);
#pragma unroll
                for (int n8 = 0; n8 < N8_TILES; ++n8)
                    add_block<Dots, Format::HAS_MINIMUM && !SHARED_MINIMUM>(acc[row_block][m16_in_block][n8], first,
                                                                            second, part, dw, mw, b[block][n8],
                                                                            da[block][n8], sa[block][n8]);
            }
        }
    }
}

// x [m, k] -> Activations [k_blocks][m] by all threads of the CTA: a thread quantizes eight columns of a token, with
// AT_ONCE loads in flight.
template <int THREADS, class In>
__device__ inline void quantize(Activations* to, const In* x, i64 k, int m, int k_blocks) {
    constexpr int SHARES = K_BLOCK / 8, AT_ONCE = 4;
    int first = 0, token = 0;  // first share of the CTA's threads, and their token
    while (first < k_blocks * SHARES) {
        float values[AT_ONCE][8] = {};
        int firsts[AT_ONCE], tokens[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            firsts[i] = first, tokens[i] = token;
            const int column = 8 * (first + int(threadIdx.x));
            if (column < k) load_eight(values[i], x + token * k + column);
            if (++token == m) token = 0, first += THREADS;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (firsts[i] >= k_blocks * SHARES) break;
            const int share = firsts[i] + int(threadIdx.x), k_block = share / SHARES;
            QuantizedShare(values[i]).store(to[k_block * m + tokens[i]], share % SHARES, k_block < k_blocks);
        }
    }
}

struct MainloopA8 {
    // The work of a CTA, with the arguments of MainloopA16::run.
    template <class Config, class Coord, class Store>
    static __device__ __forceinline__ void run(const Coord& coord, const typename Config::In* x, int m,
                                               unsigned char* memory,
                                               unsigned long long (&mbarriers)[Config::WARP_SPLIT_K][Config::STAGES],
                                               Store store) {
        using In = typename Config::In;
        using Smem = WarpSmem<Config, typename StageX<Config, In>::Type>;
        constexpr int K_BLOCKS = Config::K_BLOCKS, STAGES = Config::STAGES, WARP_SPLIT_K = Config::WARP_SPLIT_K;
        // bf16 terms, 8 bits each, of a sum of x: sums of blocks have 11 bits, sums of half blocks 22.
        constexpr int SUM_TERMS = BLOCK_SCALES<typename Config::Fields> > 1 ? 3 : 2;
        static_assert(sizeof(Smem) == Config::WARP_BYTES, "shared memory of a warp differs from the host's");
        using Format = typename Config::Fields;
        Smem& smem = reinterpret_cast<Smem*>(memory + Format::TABLE_BYTES)[coord.warp_k];
        auto& pipeline = smem.pipeline;
        const StageBarriers<STAGES, false, Config::BULK> barriers(mbarriers[coord.warp_k]);

        typename Config::WarpAcc acc = {};
        XSums<Config> x_sums = {};
        KTileIterator<Config> k_tiles = {coord};
        const auto load_w = [&](int stage) {
            const u32 bytes = pipeline.bytes(k_tiles) + (PREPARED<In> ? m * u32(sizeof(Activations)) : 0);
            barriers.first_copy(stage, bytes, [&](auto copy) { pipeline.load(k_tiles, stage, copy); });
            k_tiles.advance();
        };
        const auto multiply_by = [&](const Activations* quantized, int i, int stage) {
            multiply_stage<Config, SUM_TERMS>(acc, x_sums, smem, i, stage, {1, 1}, coord.lane, [&] {
                multiply<Config>(acc, x_sums, smem, quantized, i, stage, coord.lane);
            });
        };
        const auto share = [] { share_table<Format, half, Config::THREADS>(Format::CODE_EXPONENT); };
        if constexpr (PREPARED<In>) {
            const In* from = x + i64(coord.warp_k) * K_BLOCKS * m;  // next k_block
            int k_block = 0;
            const auto load_x = [&](int stage) {
                barriers.copy(stage, [&](auto copy) { copy(pipeline.stages[stage].x, from, m * u32(sizeof(In))); });
                from += m;
                if (++k_block == K_BLOCKS) k_block = 0, from += (WARP_SPLIT_K - 1) * K_BLOCKS * m;
            };
            main_loop<STAGES>(
                coord.count, barriers, load_w, share, [] {}, load_x,
                [&](int i, int stage) { multiply_by(pipeline.stages[stage].x, i, stage); });
        } else {
            auto* quantized =
                reinterpret_cast<Activations*>(memory + Format::TABLE_BYTES + WARP_SPLIT_K * Config::WARP_BYTES);
            const auto quantize_x = [&] {
                quantize<Config::THREADS>(quantized, x, coord.products.k, m, int(coord.tiles_along) * K_BLOCKS);
                __syncthreads();
            };
            const Activations* from = quantized + coord.warp_k * K_BLOCKS * m;  // current k_block
            main_loop<STAGES>(
                coord.count, barriers, load_w, share, quantize_x, [](int) {},
                [&](int i, int stage) {
                    multiply_by(from, i, stage);
                    from += (i % K_BLOCKS == K_BLOCKS - 1 ? 1 + (WARP_SPLIT_K - 1) * K_BLOCKS : 1) * m;
                });
        }
        __syncthreads();  // every warp has read its stages: the reduction aliases them
        reduce_and_store<Config>(acc, {ACTIVATION_UNIT, ACTIVATION_UNIT}, memory, coord, m, store);
    }
};

}  // namespace qgemm
