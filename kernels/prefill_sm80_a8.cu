// prefill_sm80_a8: y [m, n] = x @ W [n, k].T for many tokens from q8_1 blocks of x, integer dots on tensor cores by
// mma.sync (sm_80 and later).
//
// A CTA and its stages are those of sm80_tile.cuh. x comes as Activations, k_block by k_block [along][m]. A warp takes
// a block of 32
// columns at a time: the codes of all its rows as bytes, with their scales, then x by eight tokens.
// Template: Format, In (Activations), Out (float, half, bf16), TOKENS, ROW_BLOCKS, M16_TILES (2, 4), WARP_SPLIT_K,
// STAGES (at least 3), MAX_SPLIT_K.
#include "sm80_tile.cuh"
#include "dots.cuh"

using Stage = StageOf<Activations>;

// The chunks of 16 bytes of x that a thread copies for every stage. The threads of a unit take those of one split,
// which lie together.
struct XCopies {
    static constexpr int OF_UNIT = THREADS / WARP_SPLIT_K, OF_TOKEN = sizeof(Activations) / 16,
                         CHUNKS = TOKENS * OF_TOKEN;

    const uint4* x;
    i64 stride;                            // from a turn's to the next one's
    int k_block, k_blocks, chunk, chunks;  // chunks: that there are; the others' products are not stored
    u32 to;

    __device__ XCopies(Activations (&stage)[WARP_SPLIT_K][TOKENS], const Activations* all_x, const Problem& p)
        : stride(i64(WARP_SPLIT_K) * p.m * OF_TOKEN), k_blocks(min(p.k_blocks, p.end * WARP_SPLIT_K)) {
        const int warp_k = threadIdx.x / OF_UNIT;
        k_block = p.first * WARP_SPLIT_K + warp_k, chunk = threadIdx.x % OF_UNIT;
        chunks = min(TOKENS, p.m - p.first_token) * OF_TOKEN;
        x = reinterpret_cast<const uint4*>(all_x + i64(k_block) * p.m + p.first_token) + chunk;
        to = shared_address(stage[warp_k]) + 16 * chunk;
    }
    // The next stage's, `at` bytes after the first stage's; beyond the slice zeros.
    __device__ void operator()(u32 at) {
#pragma unroll
        for (int i = 0; i < CHUNKS; i += OF_UNIT)
            if (i + chunk < chunks) cp_async_16(to + at + 16 * i, x + i, k_block < k_blocks);
        x += stride, k_block += WARP_SPLIT_K;
    }
};

// Adds a k_block's products to the sums.
__device__ inline void multiply(WarpAcc& acc, const Weights& weights, const Activations* x, int k_block,
                                const WarpCoord& coord) {
    const int g = coord.lane / 4, t = coord.lane % 4, first_m16 = coord.first_m16 % WARPS;
    Format::Codes codes[M16_TILES];
#pragma unroll
    for (int m16 = 0; m16 < M16_TILES; ++m16) codes[m16] = weights.k_block.codes(first_m16 + m16, coord.lane);
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
        Bytes first[M16_TILES], second[M16_TILES];
        float2 dw[M16_TILES][SCALES], mw[M16_TILES][SCALES];
#pragma unroll
        for (int m16 = 0; m16 < M16_TILES; ++m16) {
            first[m16] = Format::bytes(codes[m16], 2 * block);
            second[m16] = Format::bytes(codes[m16], 2 * block + 1);
#pragma unroll
            for (int part = 0; part < SCALES; ++part) {
                const int index = (k_block % K_BLOCKS * BLOCKS + block) * SCALES + part;
                dw[m16][part] = weights.fields.scale(first_m16 + m16, g, index);
                mw[m16][part] = weights.fields.minimum(first_m16 + m16, g, index);
            }
        }
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; ++tile) {
            const uint2 q = *reinterpret_cast<const uint2*>(x[8 * tile + g].q + 32 * block + 8 * t);
            float da[2], sa[2];  // of tokens 2t and 2t + 1
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float2 ds = __half22float2(x[8 * tile + 2 * t + j].ds[block]);
                da[j] = ds.x, sa[j] = ds.y;
            }
#pragma unroll
            for (int m16 = 0; m16 < M16_TILES; ++m16)
#pragma unroll
                for (int part = 0; part < SCALES; ++part)
                    add_block<Biased>(acc[m16][tile], first[m16], second[m16], part, dw[m16][part], mw[m16][part], q,
                                      da, sa);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_sm80_a8(const Tile* __restrict__ tiles, const In* __restrict__ x, Out* __restrict__ y, float4* partials,
                    u32* counters, i64 n, i64 k, int m, int split_k) {
    extern __shared__ __align__(128) unsigned char memory[];
    Stage* stages = reinterpret_cast<Stage*>(memory);
    const WarpCoord coord;
    const Problem p(n, k, m, split_k);
    WeightCopies weight_copies(stages[0].weights, tiles, p);
    XCopies x_copies(stages[0].x, x, p);
    fill_stages(weight_copies, x_copies, sizeof(Stage), [] {});

    WarpAcc acc = {};
    int stage = 0, free = STAGES - 1;
    for (int k_iter = p.first; k_iter < p.end; ++k_iter) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // the stage is there, and every warp has read the one before
        weight_copies(free * sizeof(Stage));
        x_copies(free * sizeof(Stage));
        cp_async_commit();
        multiply(acc, coord.weights(stages[stage]), stages[stage].x[coord.warp_k], k_iter * WARP_SPLIT_K + coord.warp_k,
                 coord);
        free = stage;
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    }
    cp_async_wait<0>();  // the stages' memory serves the sums
    if (split_k > 1 && !SplitK{partials, counters, split_k}.add(acc, p)) return;
    store(acc, *reinterpret_cast<Stored*>(memory), y, p, coord, 1.0f);
}
