// prefill_sm80_a8: y [m, n] = x @ W [n, k].T for many tokens, x being blocks of codes: integer dot products on tensor
// cores by mma.sync (sm_80 and later).
//
// Tiles and pipeline: sm80/config.cuh, sm80/pipeline.cuh. x: Activations [k_blocks][m]. A warp multiplies one block of
// 32 columns after the other: it loads the codes of its rows as bytes, with their scales, then x, eight tokens at a
// time.
// Config: see sm80/config.cuh; In: Activations.
#include "gemm/dots.cuh"
#include "gemm/sm80/pipeline.cuh"
#include "gemm/sm80/reduce.cuh"

namespace qgemm {

// Copies x, one k_iter after the other. A team of TEAM_THREADS copies a k_block's tokens, which are adjacent, as
// 16-byte chunks.
template <class Config>
struct XLoader {
    static constexpr int BLOCK_TOKENS = Config::BLOCK_TOKENS, WARP_SPLIT_K = Config::WARP_SPLIT_K;
    static constexpr int TEAM_THREADS = Config::THREADS / WARP_SPLIT_K;
    static constexpr int TOKEN_CHUNKS = sizeof(Activations) / 16, CHUNKS = BLOCK_TOKENS * TOKEN_CHUNKS;

    const uint4* x;
    i64 stride;                            // chunks to the next k_iter
    int k_block, k_blocks, chunk, chunks;  // chunks: of tokens inside x; products of other tokens are not stored
    u32 to;                                // address of this chunk in the first stage

    __device__ XLoader(Activations (&stage)[WARP_SPLIT_K][BLOCK_TOKENS], const Activations* all_x,
                       const CtaTile<Config>& p)
        : stride(i64(WARP_SPLIT_K) * p.m * TOKEN_CHUNKS), k_blocks(min(p.k_blocks, p.end * WARP_SPLIT_K)) {
        const int warp_k = threadIdx.x / TEAM_THREADS;
        k_block = p.first * WARP_SPLIT_K + warp_k, chunk = threadIdx.x % TEAM_THREADS;
        chunks = min(BLOCK_TOKENS, p.m - p.first_token) * TOKEN_CHUNKS;
        x = reinterpret_cast<const uint4*>(all_x + i64(k_block) * p.m + p.first_token) + chunk;
        to = shared_address(stage[warp_k]) + 16 * chunk;
    }
    // Copies the next k_iter to `offset` bytes after the first stage; zeros beyond the slice.
    __device__ void load(u32 offset) {
#pragma unroll
        for (int i = 0; i < CHUNKS; i += TEAM_THREADS)
            if (i + chunk < chunks) cp_async_16(to + offset + 16 * i, x + i, k_block < k_blocks);
        x += stride, k_block += WARP_SPLIT_K;
    }
};

// acc += W @ x over a k_block. x: the CTA's tokens.
template <class Config>
__device__ inline void multiply(typename Config::WarpAcc& acc, const StageWeights<Config>& weights,
                                const Activations* x, int k_block, const WarpCoord<Config>& coord) {
    using Format = typename Config::TileFormat;
    constexpr int M16_TILES = Config::M16_TILES, SCALES = BLOCK_SCALES<Format>;
    // ptxas moves no load across __syncwarp. For grid formats with two scales per block, whose codes need ten registers
    // per 16 rows, it would otherwise keep the codes of both blocks and x of all tokens, and spill up to 52 bytes on
    // sm_120. q6_k, whose codes need six registers, does not spill; loads in order would make it up to 5% slower (H200,
    // M = 128).
    constexpr bool LOADS_IN_ORDER = SCALES > 1 && sizeof(typename Format::Codes) > 6 * sizeof(u32);
    const int g = coord.lane / 4, t = coord.lane % 4, first_m16 = coord.first_m16 % WARPS;
    typename Format::Codes codes[M16_TILES];
    const auto load_codes = [&](int m16) { codes[m16] = weights.k_block.codes(first_m16 + m16, coord.lane); };
    if (!LOADS_IN_ORDER)
#pragma unroll
        for (int m16 = 0; m16 < M16_TILES; ++m16) load_codes(m16);
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
        Bytes first[M16_TILES], second[M16_TILES];
        float2 dw[M16_TILES][SCALES], mw[M16_TILES][SCALES];
#pragma unroll
        for (int m16 = 0; m16 < M16_TILES; ++m16) {
            if (LOADS_IN_ORDER) __syncwarp(), load_codes(m16);
            first[m16] = Format::bytes(codes[m16], 2 * block);
            second[m16] = Format::bytes(codes[m16], 2 * block + 1);
#pragma unroll
            for (int part = 0; part < SCALES; ++part) {
                const int index = Config::scale_index(k_block % Config::K_BLOCKS, 2 * block + part);
                dw[m16][part] = weights.fields.scale(first_m16 + m16, g, index);
                mw[m16][part] = weights.fields.minimum(first_m16 + m16, g, index);
            }
        }
#pragma unroll
        for (int tile = 0; tile < Config::COLUMN_TILES; ++tile) {
            if (LOADS_IN_ORDER && tile % 4 == 0) __syncwarp();
            const uint2 q = *reinterpret_cast<const uint2*>(x[8 * tile + g].q + 32 * block + 8 * t);
            float da[2], sa[2];  // scale and sum of tokens 2t and 2t + 1
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float2 ds = x[8 * tile + 2 * t + j].ds[block];
                da[j] = ds.x, sa[j] = ds.y;
            }
#pragma unroll
            for (int part = 0; part < SCALES; ++part) {
                if constexpr (SCALES > 1 && Format::HAS_MINIMUM) {
                    const float2 sums = half_block_sums(q, part, da);
                    sa[0] = sums.x, sa[1] = sums.y;
                }
#pragma unroll
                for (int m16 = 0; m16 < M16_TILES; ++m16)
                    add_block<Biased<Format>>(acc[m16][tile], first[m16], second[m16], part, dw[m16][part],
                                              mw[m16][part], q, da, sa);
            }
        }
    }
}

// acc += W @ x over the CTA's slice of K.
template <class Config>
__device__ __forceinline__ void mainloop(typename Config::WarpAcc& acc, const Stage<Config, Activations>* stages,
                                         WeightLoader<Config>& w_loader, XLoader<Config>& x_loader,
                                         const CtaTile<Config>& p, const WarpCoord<Config>& coord) {
    for_stages(stages, w_loader, x_loader, p, [&](const Stage<Config, Activations>& stage, int k_iter) {
        multiply(acc, stage.weights_of(coord), stage.x[coord.warp_k], k_iter * Config::WARP_SPLIT_K + coord.warp_k,
                 coord);
    });
}

using Prefill = Sm80<Config>;

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::Prefill::THREADS, 1)
    prefill_sm80_a8(const qgemm::Prefill::Tile* __restrict__ tiles, const qgemm::Activations* __restrict__ x,
                    qgemm::Prefill::Out* __restrict__ y, float4* partials, qgemm::u32* counters, qgemm::i64 n,
                    qgemm::i64 k, int m, int split_k) {
    using namespace qgemm;
    extern __shared__ __align__(128) unsigned char memory[];
    const Smem<Prefill, Stage<Prefill, Activations>, 0> smem{memory};  // codes become bytes without a table
    auto& stages = smem.stages();
    const WarpCoord<Prefill> coord;
    const CtaTile<Prefill> p(n, k, m, split_k);
    WeightLoader<Prefill> w_loader(stages[0].weights, tiles, p);
    XLoader<Prefill> x_loader(stages[0].x, x, p);
    fill_stages(w_loader, x_loader, sizeof(stages[0]), [] {});

    Prefill::WarpAcc acc = {};
    mainloop<Prefill>(acc, stages, w_loader, x_loader, p, coord);
    if (split_k > 1 && !SplitKReduction<Prefill>{partials, counters, split_k}.reduce(acc, p)) return;
    reduce_and_store(acc, smem.reduce(), y, p, coord, [](int) { return ACTIVATION_UNIT; });
}
